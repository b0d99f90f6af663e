"""Mistakes in what models learn from: files, splits, windows and batches."""

from mutation import Mutation

SPLITS = "tests/data/test_data_splits.py"
WINDOWS = "tests/data/test_data_windows.py"
BATCHES = "tests/data/test_data_batches.py"
CORPUS = "tests/data/test_data_corpus.py"
CACHE = "tests/data/test_data_corpus_cache.py"
GENBANK = "tests/data/test_data_genbank.py"
IMAGES = "tests/data/test_data_images.py"
TOKENIZERS = "tests/data/test_data_file_tokenizers.py"

MUTATIONS = [
    Mutation(
        "a token at a cut is in two parts",
        "graphattn/data/splits.py",
        "stops = torch.minimum(last - begins, corpus.lengths)",
        "stops = torch.minimum(last - begins + 1, corpus.lengths)",
        (f"{SPLITS}::test_every_token_is_in_one_part_and_what_was_asked_for_is_not_empty",),
    ),
    Mutation(
        "the last part of a text has the share of the one before it",
        "graphattn/data/splits.py",
        "for share in (sum(shares), shares[1]):",
        "for share in (sum(shares), shares[0]):",
        (f"{SPLITS}::test_the_end_of_one_text_is_held_out_to_the_token",),
    ),
    Mutation(
        "a cut moves to the border of a record however far that is",
        "graphattn/data/splits.py",
        "abs(border - cut) <= room",
        "abs(border - cut) <= total",
        (
            f"{SPLITS}::test_a_cut_moves_to_the_border_of_a_record_that_is_near_and_else_cuts_the_record",
        ),
    ),
    Mutation(
        "equal images are learnt from and tested on",
        "graphattn/data/splits.py",
        "first[n] = known.setdefault(digest, n)",
        "first[n] = n",
        (f"{SPLITS}::test_equal_images_stay_in_one_part",),
    ),
    Mutation(
        "relatives of proteins are learnt from and tested on",
        "graphattn/data/splits.py",
        'corpus.kind not in ("protein", "structures")',
        'corpus.kind not in ("structures",)',
        (f"{SPLITS}::test_relatives_among_proteins_stay_in_one_part",),
    ),
    Mutation(
        "fragments are compared by the words of the longer sequence",
        "graphattn/data/families.py",
        "torch.minimum(num_words[a], num_words[b])",
        "torch.maximum(num_words[a], num_words[b])",
        (
            f"{SPLITS}::test_a_short_fragment_belongs_to_the_whole_and_repeats_of_one_letter_to_nothing",
        ),
    ),
    Mutation(
        "a word that a sequence repeats counts more than once",
        "graphattn/data/families.py",
        "(tokens.unfold(0, k, 1) * powers).sum(1).unique()",
        "(tokens.unfold(0, k, 1) * powers).sum(1)",
        (
            f"{SPLITS}::test_a_short_fragment_belongs_to_the_whole_and_repeats_of_one_letter_to_nothing",
        ),
    ),
    Mutation(
        "a group is all that an expression matches",
        "graphattn/data/splits.py",
        "match.groups() or (match[0],)",
        "(match[0],)",
        (f"{SPLITS}::test_a_group_is_what_parentheses_match_and_without_any_the_whole",),
    ),
    Mutation(
        "validation and test change places where records are drawn",
        "graphattn/data/splits.py",
        "part[drawn[first:last]] = 2, 1",
        "part[drawn[first:last]] = 1, 2",
        (f"{SPLITS}::test_groups_stay_whole_and_no_other_choice_of_them_is_nearer_to_the_shares",),
    ),
    Mutation(
        "records are drawn alike whatever the seed",
        "graphattn/data/splits.py",
        "torch.Generator().manual_seed(seed)",
        "torch.Generator().manual_seed(0)",
        (f"{SPLITS}::test_records_are_drawn_by_the_seed_and_come_near_the_shares",),
    ),
    Mutation(
        "what is left behind the last whole window is lost",
        "graphattn/data/windows.py",
        ".clamp(min=0) + self.stride - 1) // self.stride",
        ".clamp(min=0)) // self.stride",
        (f"{WINDOWS}::test_no_window_crosses_a_border_and_every_token_is_in_one",),
    ),
    Mutation(
        "a window reaches across the border of its part",
        "graphattn/data/windows.py",
        "numpy.minimum(found[:, 2], found[:, 1] + self.length)",
        "found[:, 1] + self.length",
        (f"{WINDOWS}::test_no_window_crosses_a_border_and_every_token_is_in_one",),
    ),
    Mutation(
        "the first window of a stretch is read from the one before",
        "graphattn/data/windows.py",
        'side="right") - 1',
        'side="left") - 1',
        (f"{WINDOWS}::test_no_window_crosses_a_border_and_every_token_is_in_one",),
    ),
    Mutation(
        "all epochs have one order",
        "graphattn/data/batches.py",
        "_EPOCH * self.epoch)",
        "_EPOCH)",
        (f"{BATCHES}::test_the_order_follows_from_seed_and_epoch_alone[False]",),
    ),
    Mutation(
        "the order is drawn from torch's own random numbers",
        "graphattn/data/batches.py",
        "            order = torch.randperm(count, generator=generator)",
        "            order = torch.randperm(count)",
        (f"{BATCHES}::test_the_order_follows_from_seed_and_epoch_alone[False]",),
    ),
    Mutation(
        "a batch has an example more than fits",
        "graphattn/data/batches.py",
        "size = max_tokens // longest",
        "size = -(-max_tokens // longest)",
        (f"{BATCHES}::test_every_example_is_in_one_batch_and_no_batch_is_larger_than_allowed",),
    ),
    Mutation(
        "packed batches are a token too large",
        "graphattn/data/batches.py",
        'before + max_tokens, side="right"',
        'before + max_tokens + 1, side="right"',
        (f"{BATCHES}::test_packed_batches_are_filled_in_order_and_join_without_padding",),
    ),
    Mutation(
        "every epoch starts where the first was gone on with",
        "graphattn/data/batches.py",
        "start, self._start = self._start, 0",
        "start = self._start",
        (f"{BATCHES}::test_an_epoch_goes_on_from_any_batch_as_it_would_have[False]",),
    ),
    Mutation(
        "an epoch goes from long examples to short ones",
        "graphattn/data/batches.py",
        "torch.randperm(len(self._cuts) - 1, generator=generator)",
        "torch.arange(len(self._cuts) - 1)",
        (f"{BATCHES}::test_batches_come_in_random_order_whatever_their_length",),
    ),
    Mutation(
        "a tokenizer adds the special tokens of its file",
        "graphattn/data/tokenizers.py",
        "self._tokenizer.encode(text, add_special_tokens=False)",
        "self._tokenizer.encode(text, add_special_tokens=True)",
        (f"{TOKENIZERS}::test_special_tokens_of_a_file_are_not_added",),
    ),
    Mutation(
        "a tokenizer cuts texts to the length that its file names",
        "graphattn/data/tokenizers.py",
        "        self._tokenizer.no_truncation()\n",
        "",
        (f"{TOKENIZERS}::test_no_text_is_cut_to_a_length_that_the_file_asks_for",),
    ),
    Mutation(
        "a vocabulary with gaps is as large as it has tokens",
        "graphattn/data/tokenizers.py",
        "max(tokens, default=-1) + 1",
        "len(tokens)",
        (
            f"{TOKENIZERS}::test_a_vocabulary_reaches_to_its_largest_token_where_numbers_are_left_out",
        ),
    ),
    Mutation(
        "a coding stretch begins a base late",
        "graphattn/data/genbank.py",
        "labels[place.first - 1 : place.last] = 1",
        "labels[place.first : place.last] = 1",
        (f"{GENBANK}::test_labels_are_the_bases_of_a_features_parts_on_either_strand",),
    ),
    Mutation(
        "a place between two bases covers both",
        "graphattn/data/genbank.py",
        "if place.defect & place.Defect.BETWEEN:",
        "if False:",
        (f"{GENBANK}::test_labels_are_the_bases_of_a_features_parts_on_either_strand",),
    ),
    Mutation(
        "errors in an entry name the line before it",
        "graphattn/data/genbank.py",
        "entries.append((begin + 1,",
        "entries.append((begin,",
        (f"{GENBANK}::test_a_malformed_file_names_its_line",),
    ),
    Mutation(
        "height and width of colour images change places",
        "graphattn/data/images.py",
        "if len(shape) == 3 else image.transpose(2, 0, 1)",
        "if len(shape) == 3 else image.transpose(2, 1, 0)",
        (f"{IMAGES}::test_colours_of_idx_images_come_before_height_and_width",),
    ),
    Mutation(
        "height and width of pictures change places",
        "graphattn/data/images.py",
        "pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)",
        "pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 1, 0)",
        (f"{IMAGES}::test_a_picture_keeps_its_channels",),
    ),
    Mutation(
        "an image has the label of the one before",
        "graphattn/data/corpus/readers.py",
        "label = int(labels[count - 1])",
        "label = int(labels[count - 2])",
        (f"{IMAGES}::test_images_of_idx_are_their_bytes_over_255_with_labels_beside",),
    ),
    Mutation(
        "white is less than 1",
        "graphattn/data/corpus/corpus.py",
        "numpy.float32(255)",
        "numpy.float32(256)",
        (f"{IMAGES}::test_images_of_idx_are_their_bytes_over_255_with_labels_beside",),
    ),
    Mutation(
        "labels of a window are those of the record's beginning",
        "graphattn/data/corpus/corpus.py",
        'self._long("label", i, start, stop)',
        'self._long("label", i, 0, stop - start)',
        (f"{CORPUS}::test_labels_and_tokens_are_cut_alike",),
    ),
    Mutation(
        "the structure of a window is that of the record's beginning",
        "graphattn/data/corpus/corpus.py",
        "part_of_structure(whole, start, stop)",
        "part_of_structure(whole, 0, stop - start)",
        (f"{WINDOWS}::test_labels_and_structures_are_cut_with_their_tokens",),
    ),
    Mutation(
        "a file that changed without growing is not read again",
        "graphattn/data/corpus/sources.py",
        "status.st_size, status.st_mtime_ns",
        "status.st_size",
        (f"{CACHE}::test_a_source_that_changed_is_read_again",),
    ),
    Mutation(
        "a damaged cache is read",
        "graphattn/data/corpus/corpus.py",
        'and facts["bytes"] == sizes else None',
        "else None",
        (f"{CACHE}::test_a_damaged_cache_is_written_again",),
    ),
    Mutation(
        "corpora with other labels have one fingerprint",
        "graphattn/data/corpus/writer.py",
        "            self._hash.update(labels)\n",
        "",
        (f"{CACHE}::test_other_labels_of_the_same_tokens_give_another_fingerprint",),
    ),
    Mutation(
        "bytes of a text are counted as characters",
        "graphattn/data/corpus/readers.py",
        'len(piece) if piece.isascii() else len(piece.encode("utf-8"))',
        "len(piece)",
        (f"{CORPUS}::test_a_text_comes_back_from_bytes_and_characters",),
    ),
    Mutation(
        "lines of earlier pieces of a text are not counted",
        "graphattn/data/corpus/encoding.py",
        '        line += piece.count("\\n")\n',
        "",
        (f"{CORPUS}::test_a_malformed_text_names_its_line",),
    ),
    Mutation(
        "a line end that was cut in two counts twice",
        "graphattn/data/corpus/streams.py",
        'return ends - (after_return and data.startswith(b"\\n"))',
        "return ends",
        (f"{CORPUS}::test_a_malformed_text_names_its_line",),
    ),
    Mutation(
        "the largest token does not fit into the integers of a corpus",
        "graphattn/data/corpus/encoding.py",
        "max(vocab_size - 1, 0)",
        "max(vocab_size - 2, 0)",
        (f"{CORPUS}::test_tokens_lie_in_the_smallest_integers_that_hold_them",),
    ),
]
