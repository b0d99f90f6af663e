"""The maximum stable learning rate against closed forms, dense Hessians and real steps."""

import copy
import math

import pytest
import torch
from torch import nn

import graphattn as ga
from graphattn import diagnostics

EVERY_STEP = {"max_norm": None, "state_batches": 0, "warmup_steps": 0}


def once(model, loss_fn, optimizer, batches=(1.0,), **options):
    return diagnostics.max_stable_lr(
        model, loss_fn, optimizer, batches, **{**EVERY_STEP, "steps": 1, **options}
    )


class Point(nn.Module):
    """Parameters that are a vector."""

    def __init__(self, theta):
        super().__init__()
        self.theta = nn.Parameter(theta)


def quadratic(A):
    return lambda model, batch: model.theta @ A @ model.theta / 2 - batch @ model.theta


def spd(n, seed=0):
    basis = torch.linalg.qr(torch.randn(n, n, generator=seeded(seed), dtype=torch.float64)).Q
    spectrum = torch.logspace(-1, 1, n, dtype=torch.float64)
    return basis @ spectrum.diag() @ basis.T, basis, spectrum


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("method", ["hvp", "finite_difference"])
def test_on_a_quadratic_sgd_has_the_closed_form_of_eq_19(method):
    A, _, spectrum = spd(8)
    model = Point(torch.randn(8, generator=seeded(1), dtype=torch.float64))
    theta, batches = model.theta.detach().clone(), list(torch.randn(12, 8).double())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    measured = diagnostics.max_stable_lr(
        model, quadratic(A), sgd, batches, method=method, steps=12, **EVERY_STEP
    )
    for value, b in zip(measured.values, batches, strict=True):
        g = A @ theta - b
        assert value == pytest.approx((2 * g @ g / (g @ A @ g)).item(), rel=1e-6)
        assert value > 2 / spectrum[-1].item()
        theta = theta - 0.05 * g


@pytest.mark.parametrize("mode", [0, 3, 7])
def test_along_an_eigenvector_the_limit_is_2_over_its_eigenvalue(mode):
    A, basis, spectrum = spd(8)
    model = Point(basis[:, mode].clone())
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    (value,) = once(model, quadratic(A), sgd, [torch.zeros(8).double()]).values
    assert value == pytest.approx(2 / spectrum[mode].item(), rel=1e-9)


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_on_a_quadratic_the_loss_falls_below_the_limit_and_rises_above_it(factor):
    A, _, _ = spd(6)
    start = Point(torch.randn(6, generator=seeded(2), dtype=torch.float64))
    b = torch.zeros(6).double()

    def sgd(model, lr):
        return torch.optim.SGD(model.parameters(), lr=lr)

    measured = once(start, quadratic(A), sgd(start, 1e-3), [b])
    model = copy.deepcopy(start)
    loss = quadratic(A)(model, b)
    loss.backward()
    sgd(model, factor * measured.values[0]).step()
    assert (quadratic(A)(model, b) < loss) == (factor < 1)


def test_uphill_is_0_and_without_curvature_there_is_no_limit():
    model = Point(torch.tensor([1.0]))
    down = torch.optim.SGD(model.parameters(), lr=0.1)
    up = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    cases = [
        (down, lambda m, b: m.theta.sum() * b, math.inf),  # linear
        (down, lambda m, b: -(m.theta**2).sum() * b, math.inf),  # curved downward
        (down, lambda m, b: (m.theta**2).sum() * b, 1.0),
        (up, lambda m, b: (m.theta**2).sum() * b, 0.0),
        (down, lambda m, b: (m.theta**2).sum() * math.nan, math.nan),
    ]
    for method in ("hvp", "finite_difference"):
        for optimizer, loss_fn, expected in cases:
            if method == "finite_difference" and expected == math.inf and loss_fn is cases[0][1]:
                continue  # rounding is no exact 0
            measured = once(model, loss_fn, optimizer, [1.0], method=method)
            assert measured.values[0] == pytest.approx(expected, rel=1e-2, nan_ok=True)


# A small problem of every kind of optimizer.

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "weight decay": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.5, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
}


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.net(x)


def perceptron_loss(model, batch):
    x, y = batch
    return 10 * (model(x).squeeze(-1) - y).square().mean()


def perceptron_batches(count, dtype=torch.float64):
    generator = seeded(3)
    x = torch.randn(count, 16, 3, generator=generator, dtype=torch.float64)
    return [(each.to(dtype), each.sum(-1).sin().to(dtype)) for each in x]


def by_real_steps(model, optimizer, batches, *, max_norm, state_batches, warmup_steps, steps):
    """Eq. 18 by a training loop: real steps of the real optimizer and a dense Hessian."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    names = {id(p): name for name, p in model.named_parameters()}

    def loss_of(flat, batch):
        parts = flat.split([p.numel() for p in parameters])
        values = {names[id(p)]: part.view_as(p) for p, part in zip(parameters, parts, strict=True)}
        return perceptron_loss(lambda x: torch.func.functional_call(model, values, (x,)), batch)

    def flat():
        return torch.cat([p.detach().reshape(-1) for p in parameters])

    values = []
    for n, batch in enumerate(batches):
        optimizer.zero_grad()
        perceptron_loss(model, batch).backward()
        gradient = torch.autograd.functional.jacobian(lambda f, b=batch: loss_of(f, b), flat())
        hessian = torch.autograd.functional.hessian(lambda f, b=batch: loss_of(f, b), flat())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, max_norm)
        before = [p.detach().clone() for p in parameters]
        here = flat()
        optimizer.step()
        u = (flat() - here) / optimizer.param_groups[0]["lr"]
        if n < state_batches:
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)
        if n >= state_batches + warmup_steps:
            slope, curvature = (gradient @ u).item(), (u @ hessian @ u).item()
            if slope >= 0:
                values.append(0.0)
            else:
                values.append(math.inf if curvature <= 0 else -2 * slope / curvature)
    assert len(values) == steps
    return values


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_any_optimizer_is_measured_along_the_steps_it_really_makes(name, max_norm):
    torch.manual_seed(0)
    model = Perceptron().double()
    protocol = {"max_norm": max_norm, "state_batches": 3, "warmup_steps": 2, "steps": 6}
    batches = perceptron_batches(11)
    optimizer = OPTIMIZERS[name](model.parameters())
    measured = diagnostics.max_stable_lr(model, perceptron_loss, optimizer, batches, **protocol)
    other = copy.deepcopy(model)
    expected = by_real_steps(other, OPTIMIZERS[name](other.parameters()), batches, **protocol)
    assert any(0 < value < math.inf for value in expected)
    # clip_grad_norm_ divides by norm + 1e-6.
    assert measured.values == pytest.approx(expected, rel=1e-4)
    differences = diagnostics.max_stable_lr(
        model, perceptron_loss, optimizer, batches, method="finite_difference", **protocol
    )
    assert differences.values == pytest.approx(measured.values, rel=1e-2)


def test_an_optimizer_in_training_keeps_its_moments_and_its_count():
    torch.manual_seed(0)
    model, batches = Perceptron().double(), perceptron_batches(30)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for batch in batches[:20]:
        optimizer.zero_grad()
        perceptron_loss(model, batch).backward()
        optimizer.step()
    measured = diagnostics.max_stable_lr(
        model, perceptron_loss, optimizer, batches[20:], steps=10, **EVERY_STEP
    )
    expected = by_real_steps(model, optimizer, batches[20:], steps=10, **EVERY_STEP)
    assert measured.values == pytest.approx(expected, rel=1e-6)


def test_tiny_learning_rates_do_not_drown_in_float32():
    torch.manual_seed(0)
    model, batches = Perceptron(), perceptron_batches(6, torch.float32)
    values = {}
    for lr in (1e-3, 1e-9):
        sgd = torch.optim.SGD(model.parameters(), lr=lr)
        values[lr] = once(model, perceptron_loss, sgd, batches[:1]).values
    assert values[1e-9] == pytest.approx(values[1e-3], rel=1e-5)


def test_decoupled_weight_decay_is_part_of_the_step():
    """AdamW shrinks the parameters even at a minimum of the loss: uphill, so no step is stable."""
    model = Point(torch.tensor([2.0, 2.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    shifted = lambda m, b: ((m.theta - 2 - 1e-12) ** 2).sum()  # noqa: E731
    optimizer.param_groups[0]["eps"] = 1.0  # so that the gradient's own step is next to nothing
    measured = once(model, shifted, optimizer, [0])
    assert measured.values == (0.0,)


def test_groups_are_scaled_together_in_units_of_the_first():
    A = torch.eye(2, dtype=torch.float64)
    model = nn.ParameterList([torch.ones(1).double(), torch.ones(1).double()])
    sgd = torch.optim.SGD([{"params": [model[0]], "lr": 0.1}, {"params": [model[1]], "lr": 0.3}])
    loss_fn = lambda m, b: torch.cat(list(m)) @ A @ torch.cat(list(m)) / 2  # noqa: E731
    measured = once(model, loss_fn, sgd, [0])
    u = torch.tensor([-1.0, -3.0])
    assert measured.values[0] == pytest.approx(-2 * (u.sum() / (u @ u)).item())
    assert measured.lr == 0.1


# Models of the library.


class Noisy(nn.Module):
    """An encoder with everything that a run may disturb: dropout and running means."""

    def __init__(self, mixer):
        super().__init__()
        self.encoder = ga.models.SequenceEncoder(
            9, 8, depth=2, heads=2, mixer=mixer, edge_hidden=4, dropout=0.2
        )
        self.norm = nn.BatchNorm1d(9)

    def forward(self, tokens):
        return self.norm(self.encoder(tokens).transpose(-1, -2)).transpose(-1, -2)


def token_loss(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten())


def everything_of(model, optimizer):
    tensors = [*model.parameters(), *model.buffers()]
    grads = [p.grad for p in model.parameters()]
    state = optimizer.state_dict()
    return copy.deepcopy(
        {
            "tensors": tensors,
            "addresses": [t.data_ptr() for t in tensors],
            "grads": grads,
            "modes": [m.training for m in model.modules()],
            "state": state["state"],
            "groups": state["param_groups"],
            "random": torch.get_rng_state(),
        }
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("mixer", ["dot", "consensus"])
@pytest.mark.parametrize("method", ["hvp", "finite_difference"])
@pytest.mark.parametrize("fails", [False, True])
def test_model_optimizer_and_random_numbers_come_back_bit_for_bit(mixer, method, fails):
    torch.manual_seed(0)
    model = Noisy(mixer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = list(torch.randint(9, (12, 2, 6), generator=seeded()))
    for batch in batches[:3]:
        optimizer.zero_grad()
        token_loss(model, batch).backward()
        optimizer.step()
    before = everything_of(model, optimizer)
    calls = []

    def loss_fn(model, batch):
        calls.append(0)
        if fails and len(calls) == 9:
            raise RuntimeError("mine")
        return token_loss(model, batch)

    def run():
        return diagnostics.max_stable_lr(
            model, loss_fn, optimizer, batches, method=method, state_batches=2, warmup_steps=2,
            steps=8,
        )  # fmt: skip

    if fails:
        with pytest.raises(RuntimeError, match="mine"):
            run()
    else:
        assert len(run().values) == 8
    assert same(everything_of(model, optimizer), before)


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["dot", "consensus", "mix"])
def test_both_estimators_agree_on_an_encoder_with_dropout(mixer):
    torch.manual_seed(0)
    model = Noisy(mixer).double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = list(torch.randint(9, (10, 2, 6), generator=seeded()))
    by_method = [
        diagnostics.max_stable_lr(
            model, token_loss, optimizer, batches, method=method, state_batches=3, warmup_steps=1,
            steps=6, epsilon=1e-6,
        )
        for method in ("hvp", "finite_difference")
    ]  # fmt: skip
    assert by_method[0].values == pytest.approx(by_method[1].values, rel=1e-2)
    assert sum(0 < v < math.inf for v in by_method[0].values) >= 3


def test_the_default_protocol_takes_35_batches_and_records_25():
    model = Point(torch.ones(2))
    loss_fn = lambda m, b: (m.theta**2).sum() * b  # noqa: E731
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = iter([1.0] * 40)
    assert len(diagnostics.max_stable_lr(model, loss_fn, sgd, taken).values) == 25
    assert len(list(taken)) == 5
    with pytest.raises(ValueError, match=r"batches must yield 35 batches .* got 34"):
        diagnostics.max_stable_lr(model, loss_fn, sgd, [1.0] * 34)


def test_moments_are_warmed_without_a_step_and_bias_correction_counts_from_6():
    """Adam's step is the sign of a gradient that all batches share, whatever the count."""
    model = Point(torch.tensor([3.0, -4.0], dtype=torch.float64))
    adam = torch.optim.Adam(model.parameters(), lr=0.5, eps=0.0)
    seen = []

    def loss_fn(model, batch):
        seen.append(model.theta.detach().clone())
        return (model.theta**2).sum() / 2

    measured = diagnostics.max_stable_lr(model, loss_fn, adam, [0] * 7, warmup_steps=1, steps=1)
    assert all(torch.equal(theta, seen[0]) for theta in seen[:6])
    torch.testing.assert_close(seen[6], torch.tensor([2.5, -3.5], dtype=torch.float64))
    # Then u = -m_hat / sqrt(v_hat) after six gradients c (3, -4) and one c' (2.5, -3.5).
    g = [torch.tensor([3.0, -4.0]).double() / 5] * 6 + [seen[6] / seen[6].norm()]
    m = sum(0.1 * 0.9 ** (6 - k) * g[k] for k in range(7)) / (1 - 0.9**7)
    v = sum(0.001 * 0.999 ** (6 - k) * g[k] ** 2 for k in range(7)) / (1 - 0.999**7)
    u = -m / v.sqrt()
    assert measured.values[0] == pytest.approx((-2 * seen[6] @ u / (u @ u)).item(), rel=1e-9)


def test_medians_leave_infinity_out_and_shares_count_it_as_stable():
    rates = diagnostics.StableLearningRate((0.0, 1.0, 3.0, math.inf, 2.0), lr=1.5)
    assert rates.median == 1.5
    assert rates.share_stable() == 3 / 5
    assert rates.share_stable(0.5) == 4 / 5
    assert str(rates) == (
        "maximum stable learning rate: median 1.5 (quartiles 0 .. 2) over 5 steps, "
        "1 of them without a limit, 60% of them stable at lr = 1.5"
    )
    assert diagnostics.StableLearningRate((math.inf,), 1.0).median == math.inf
    broken = diagnostics.StableLearningRate((1.0, math.nan), 0.5)
    assert math.isnan(broken.median)
    assert broken.share_stable() == 0.5
    assert str(broken)


def test_a_loss_that_cannot_be_differentiated_twice_names_the_other_method():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    model = Point(torch.ones(2).double())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = lambda m, b: Once.apply(m.theta) ** 2  # noqa: E731
    with pytest.raises(RuntimeError, match=r"once_differentiable.*finite_difference"):
        once(model, loss_fn, sgd)
    assert once(model, loss_fn, sgd, method="finite_difference").values[0] == pytest.approx(1 / 12)


def test_torch_says_itself_where_it_has_no_second_derivative_and_the_other_method_is_named():
    q = torch.randn(1, 1, 4, 8)
    model = Point(torch.ones(8))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        attend = nn.functional.scaled_dot_product_attention
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
            return attend(q * model.theta, q, q).square().sum()

    with pytest.raises(RuntimeError) as raised:
        once(model, loss_fn, sgd)
    assert "finite_difference" in raised.value.__notes__[0]
    assert once(model, loss_fn, sgd, method="finite_difference").values[0] >= 0


MODEL = Point(torch.ones(2))
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)
SQUARE = lambda m, b: (m.theta**2).sum()  # noqa: E731


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: once(3, SQUARE, SGD), "model must be a torch.nn.Module"),
        (lambda: once(MODEL, 3, SGD), "loss_fn must be callable"),
        (lambda: once(MODEL, SQUARE, 3), "optimizer must be a torch Optimizer"),
        (lambda: once(MODEL, SQUARE, torch.optim.LBFGS(MODEL.parameters())), "got LBFGS"),
        (lambda: once(MODEL, SQUARE, torch.optim.SGD(MODEL.parameters(), lr=0.0)), "lr = 0.0"),
        (lambda: once(MODEL, SQUARE, SGD, method="both"), "method must be one of"),
        (lambda: once(MODEL, SQUARE, SGD, max_norm=0), "max_norm must be a finite number > 0"),
        (lambda: once(MODEL, SQUARE, SGD, epsilon=-1), "epsilon must be"),
        (lambda: once(MODEL, SQUARE, SGD, steps=0), "steps must be >= 1"),
        (lambda: once(MODEL, SQUARE, SGD, warmup_steps=-1), "warmup_steps must be >= 0"),
        (lambda: once(MODEL, SQUARE, SGD, state_batches=1.5), "state_batches must be an integer"),
        (lambda: once(MODEL, lambda m, b: m.theta, SGD), r"loss_fn must return a scalar .*\[2\]"),
        (lambda: once(MODEL, lambda m, b: 1.0, SGD), "loss_fn must return a scalar .* float"),
        (
            lambda: once(MODEL, lambda m, b: torch.ones(1, requires_grad=True).sum(), SGD),
            "the result of loss_fn must depend on the optimizer's parameters",
        ),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()
