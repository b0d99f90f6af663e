"""Are texts generated after training at a high rate worse with attention than with consensus?

Letters come from a hidden Markov model, which is also an exact oracle: the forward algorithm gives
the probability of every generated text.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from consensus_text_causal import SHARED
from evidence import Experiment, Findings, Verdict, main
from rates import PAPERS_OPTIMIZER, Arm, cpu_hours, run_arms, summary
from sweep_claims import OPTIONS
from torch import Tensor

import graphattn as ga

RATES = (1e-3, 1e-2, 1e-1)
SEEDS = 2
STATES, LETTERS = 8, "abcdefghijklmnop"
LENGTH, TEXTS = 128, 64
ARMS = {"sa": Arm("dot"), "sc": Arm("consensus", OPTIONS), "mix": Arm("mix", OPTIONS)}
TOO_LITTLE = 0.1

EXPERIMENT = Experiment(
    name="consensus_generation",
    title="Generated texts after training at a high rate, with an exact oracle",
    paper="Stabilizing Transformer Training Through Consensus, Section 5.1 (generative NLL)",
    claim="The negative log-likelihood of generated samples under a larger model degrades less "
    "with SC than with SA when the learning rate is too high.",
    prediction="Texts of 128 letters are generated at temperature 1, and scored by the hidden "
    "Markov model that made the training data. The score at rate 0.1 minus that at the best rate "
    "of the mechanism, in nats per letter, is smaller for SC than for SA.",
    refuted_if="A rise of SC that is at least that of SA. If SA rises by less than 0.1 nats, it "
    "is inconclusive.",
    config={
        "states": STATES,
        "letters": LETTERS,
        "texts": TEXTS,
        "rates": RATES,
        "arms": {name: {"mixer": arm.mixer, **arm.options} for name, arm in ARMS.items()},
        **PAPERS_OPTIMIZER,
        **SHARED,
    },
    notes="The paper's oracles are GPT-2-Large, Evo2-1B and Odyssey-1.2B, which are models "
    "themselves. A text that repeats likely letters has a low score without being typical: the "
    "table shows the entropy of the letters, too. Letters of the data have 2.04. Seen afterwards: "
    "one of the two seeds of SA at rate 0.1 has 2.54 nats and the other 1.83, so the size of its "
    "rise is uncertain. At the two lower rates SA writes better texts than SC: consensus, whose "
    "layers see three tokens, knows less about the state of the hidden Markov model.",
)


class HiddenMarkov:
    """A hidden Markov model with random transitions and letters, always the same."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def rows(count: int, sharpness: float) -> Tensor:
            logits = torch.randn(STATES, count, generator=generator, dtype=torch.float64)
            return (sharpness * logits).softmax(-1)

        self.transition, self.emission = rows(STATES, 3.0), rows(len(LETTERS), 3.0)
        self.start = torch.linalg.matrix_power(self.transition, 1000)[0]

    def draw(self, length: int) -> str:
        generator = torch.Generator().manual_seed(1)
        state = int(torch.multinomial(self.start, 1, generator=generator))
        letters = []
        for _ in range(length):
            letters.append(int(torch.multinomial(self.emission[state], 1, generator=generator)))
            state = int(torch.multinomial(self.transition[state], 1, generator=generator))
        return "".join(LETTERS[letter] for letter in letters)

    def nats(self, tokens: Tensor) -> Tensor:
        """Return -log p of texts [B, N], in nats per letter, by the forward algorithm."""
        belief = self.start.expand(len(tokens), STATES)
        total = torch.zeros(len(tokens), dtype=torch.float64)
        for letter in tokens.unbind(1):
            joint = belief * self.emission[:, letter].T
            likelihood = joint.sum(-1)
            total -= likelihood.log()
            belief = (joint / likelihood[:, None]) @ self.transition
        return total / tokens.shape[1]


def entropy(tokens: Tensor) -> float:
    """Return the entropy of the letters, in nats."""
    share = tokens.flatten().bincount(minlength=len(LETTERS)) / tokens.numel()
    return float(-(share * share.clamp_min(1e-30).log()).sum())


def score(folder: Path, model: HiddenMarkov) -> tuple[float, float]:
    """Return nats per letter and the entropy of texts that a trained model writes."""
    trained = ga.train.load_trained(folder)
    letters = trained.tokenizer.decode(list(range(len(LETTERS))))  # tokens in order of letters
    assert letters == LETTERS
    generator = torch.Generator().manual_seed(0)
    first = torch.multinomial(model.start @ model.emission, TEXTS, True, generator=generator)
    texts = trained.model.generate(first[:, None], LENGTH - 1, temperature=1.0, generator=generator)
    return float(model.nats(texts).mean()), entropy(texts)


def judged(scores: dict[tuple[str, float], list[float]]) -> tuple[Verdict, str]:
    if len(scores) < len(ARMS) * len(RATES):
        return "open", f"{len(scores)} of {len(ARMS) * len(RATES)} settings are done."
    rises = {}
    for arm in ARMS:
        by_rate = [statistics.fmean(scores[arm, lr]) for lr in RATES]
        rises[arm] = by_rate[-1] - min(by_rate)
    why = "Nats per letter at 0.1 above the best rate: " + ", ".join(
        f"{arm.upper()} {rises[arm]:+.3f}" for arm in ARMS
    )
    if rises["sa"] < TOO_LITTLE:
        return "inconclusive", f"{why}."
    return ("held" if rises["sc"] < rises["sa"] else "not held"), f"{why}."


def measure(arguments: Namespace) -> Findings:
    torch.set_num_threads(1)
    model = HiddenMarkov()
    file = Path(arguments.work) / "letters.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        file.write_text(model.draw(400_000), encoding="utf-8")
    rows = run_arms(arguments, ARMS, RATES, SEEDS, {**SHARED, "data": str(file)})
    scores: dict[tuple[str, float], list[float]] = {}
    entropies: dict[tuple[str, float], list[float]] = {}
    runs = []
    for row in rows:
        if row["status"] != "finished":
            continue
        found, spread_of_letters = score(file.parent / row["arm"] / row["folder"], model)
        scores.setdefault((row["arm"], row["lr"]), []).append(found)
        entropies.setdefault((row["arm"], row["lr"]), []).append(spread_of_letters)
        runs.append({"arm": row["arm"], "lr": row["lr"], "seed": row["seed"], "nats": found,
                     "entropy": spread_of_letters, "loss": row["loss"]})  # fmt: skip
    numbers = [
        summary(arm, f"lr {lr:g}{of}", own)
        for of, values in (("", scores), (", entropy of the letters", entropies))
        for (arm, lr), own in values.items()
    ]

    def draw(ax: Any) -> None:
        for number, arm in enumerate(ARMS):
            for lr in RATES:
                own = scores.get((arm, lr), [])
                beside = lr * 1.06 ** (number - 1)  # so that points do not hide each other
                ax.plot([beside] * len(own), own, "o", color=f"C{number}",
                        label=arm if lr == RATES[0] else None)  # fmt: skip
        ax.set(xscale="log", xlabel="learning rate", ylabel="nats per generated letter (oracle)")
        ax.legend()

    verdict, why = judged(scores)
    return Findings(
        numbers=numbers,
        verdict=verdict,
        why=why,
        runs=runs,
        seeds=list(range(SEEDS)),
        cpu_hours=cpu_hours(rows),
        draw=draw,
        columns=("nats per letter", "deviation"),
    )


if __name__ == "__main__":
    main(EXPERIMENT, measure)
