"""Names, wrapped models, random numbers and models with another head, for all objectives."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphattn as ga


def tokens(lengths=(9, 6), vocab_size: int = 20) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (n,), generator=random) for n in lengths]


def case(name: str, **options):
    """A model, an objective and a batch."""
    torch.manual_seed(0)
    texts = [{"tokens": needed, "label": 1, "labels": needed.float()} for needed in tokens()]
    encoder = ga.models.SequenceEncoder(21, 16, 2, 2, mixer="mix", edge_hidden=8)
    image = [{"image": torch.rand(1, 8, 8), "label": 2} for _ in range(2)]
    cases = {
        "masked": (ga.models.ProteinModel(16, 2, 2), {"mask_token": 21}, texts),
        "causal": (ga.models.CausalLM(20, 16, 2, 2, window=4), {}, texts),
        "classification": (ga.train.WithHead(encoder, 3), {"num_classes": 3}, texts),
        "regression": (ga.train.WithHead(encoder, 1), {}, texts),
        "vision": (
            ga.models.VisionTransformer(8, 4, 3, 16, 1, 2, channels=1),
            {"num_classes": 3},
            image,
        ),
    }
    model, needed, examples = cases[name]
    kind = "classification" if name == "vision" else name
    objective = ga.train.objective(kind, **{**needed, **options})
    return model, objective, objective.collate(examples)


CASES = ["masked", "causal", "classification", "regression", "vision"]


def loss(model, objective, batch):
    return objective.loss(model, batch, torch.Generator().manual_seed(1))


@pytest.fixture
def process_group(tmp_path):
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.every_case
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_model_in_ddp_loses_the_same_and_all_of_it_has_gradients(name, packed, process_group):
    model, objective, batch = case(name, packed=packed)
    expected = loss(model, objective, batch)
    parallel = DistributedDataParallel(model)
    for _ in range(2):  # a parameter without a gradient would stop the second step
        parallel_loss = loss(parallel, objective, batch)
        parallel_loss.mean.backward()
    torch.testing.assert_close(parallel_loss.total, expected.total)
    assert parallel_loss.sums == pytest.approx(expected.sums)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_loses_the_same(name, packed):
    torch._dynamo.reset()
    model, objective, batch = case(name, packed=packed)
    expected = loss(model, objective, batch)
    compiled_loss = loss(torch.compile(model, backend="eager"), objective, batch)
    torch.testing.assert_close(compiled_loss.total, expected.total, rtol=1e-4, atol=1e-4)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_under_autocast_losses_are_summed_in_float32(name):
    model, objective, batch = case(name)
    expected = loss(model, objective, batch)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = loss(model, objective, batch)
    rounded.mean.backward()
    assert rounded.total.dtype == torch.float32
    assert rounded.count == expected.count
    torch.testing.assert_close(rounded.total, expected.total, rtol=0.1, atol=0.05)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_without_a_generator_random_numbers_are_torchs_own(name):
    """A checkpoint restores those, so that a run that goes on draws what it would have drawn."""
    model, objective, batch = case(name)
    model.train()
    state = torch.get_rng_state()
    first = objective.loss(model, batch).total
    second = objective.loss(model, batch).total
    torch.set_rng_state(state)
    assert torch.equal(objective.loss(model, batch).total, first)
    assert torch.equal(objective.loss(model, batch).total, second)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_losses_of_batches_add_up_to_the_loss_of_both(name):
    model, objective, batch = case(name)
    first = objective.evaluate(model, [batch], seed=0)["loss"]
    again = objective.evaluate(model, [batch, batch], seed=0)["loss"]
    both = [objective.evaluate(model, [batch], seed=s)["loss"] for s in (0, 1_000_003)]
    counts = [
        objective.loss(model, batch, torch.Generator().manual_seed(s)).count for s in (0, 1_000_003)
    ]
    mean = sum(n * x for n, x in zip(counts, both, strict=True)) / sum(counts)
    assert again == pytest.approx(mean, rel=1e-5)
    assert first > 0


def test_an_objective_is_made_by_its_name():
    masked = ga.train.objective("masked", mask_token=4, schedule="cosine", replace=True)
    assert isinstance(masked, ga.train.MaskedTokens)
    assert repr(masked) == "MaskedTokens(mask_token=4, schedule='cosine', replace=True)"
    for name in ("masked", "causal", "classification", "regression"):
        options = {"masked": {"mask_token": 3}, "classification": {"num_classes": 2}}
        made = ga.train.objective(name, **options.get(name, {}))
        assert made.name == name
        assert isinstance(made, ga.train.Objective)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("mlm", {}, "objective must be one of 'masked', 'causal'.*, got 'mlm'"),
        ("maskd", {}, "objective must be one of .* got 'maskd': did you mean 'masked'"),
        ("masked", {"mask_token": 3, "schedul": "cosine"}, "'schedul': did you mean 'schedule'"),
        ("causal", {"label_smoothing": 0.1}, "has no option 'label_smoothing': it has"),
        ("masked", {}, "objective 'masked' needs the option 'mask_token'"),
        ("classification", {"num_classes": "ten"}, "num_classes must be an integer"),
    ],
)
def test_names_and_options_that_there_are_not_are_refused(name, options, says):
    with pytest.raises(ValueError, match=says):
        ga.train.objective(name, **options)


# Models with another head.


@pytest.mark.parametrize("name", ["classification", "regression"])
def test_a_model_with_another_head_is_saved_and_loaded(name, tmp_path):
    model, objective, batch = case(name)
    ga.save(model, tmp_path)
    twin = ga.load(tmp_path)
    assert isinstance(twin, ga.train.WithHead)
    model.eval()
    assert torch.equal(loss(twin, objective, batch).total, loss(model, objective, batch).total)


def test_another_head_keeps_what_the_model_has_learned_and_all_of_its_parameters_are_used():
    model = ga.models.SequenceEncoder(20, 16, 2, 2)
    learned = model.encode(tokens()[0])
    other = ga.train.WithHead(model, 5)
    outputs = other(tokens()[0])
    outputs.sum().backward()
    assert all(p.grad is not None for p in other.parameters())
    torch.testing.assert_close(outputs, other.model.head(learned))
    assert model.head.out_features == 20
    assert all(p.grad is None for p in model.parameters())


def test_gradient_checkpointing_reaches_the_model_inside():
    model, objective, batch = case("classification")
    expected = loss(model, objective, batch).total
    model.gradient_checkpointing_enable()
    assert model.model.is_gradient_checkpointing
    torch.testing.assert_close(loss(model, objective, batch).total, expected)
    model.gradient_checkpointing_disable()
    assert not model.model.is_gradient_checkpointing


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(2, 2), "got a Linear"),
        (lambda: ga.models.VisionTransformer.from_preset("digits"), "model must be a Seq"),
        (lambda: ga.models.CausalLM(9, 8, 1, 2, tie_weights=True), "tie_weights=False"),
        (lambda: ga.models.CausalLM(9, 8, 1, 2, logit_softcap=3.0), "logit_softcap=None"),
    ],
)
def test_models_that_cannot_have_another_head_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        ga.train.WithHead(make(), 3)
