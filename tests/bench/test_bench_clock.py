"""A number of `graphattn bench` means the same in every row: threads, company, busy machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphattn as ga
from graphattn.bench.cases import catalogue as cases
from graphattn.bench.cases.attention import causal_window
from graphattn.bench.cases.case import FORWARD, TWICE
from graphattn.bench.cases.inputs import AttentionInputs
from graphattn.bench.measuring import host_clock
from graphattn.bench.measuring import passes as measure
from graphattn.bench.reporting import record, tables
from graphattn.bench.reporting.record import OURS, Record

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    with host_clock.threads(2):
        yield


class Machine:
    """Time that only contenders spend: `seconds` of who runs, with how many threads, after whom."""

    def __init__(self, monkeypatch, seconds) -> None:
        self.now, self.seconds, self.last = 0.0, seconds, ""
        self.order: list[str] = []
        monkeypatch.setattr(host_clock.time, "perf_counter", lambda: self.now)

    def contender(self, name: str):
        def work() -> None:
            self.now += self.seconds(name, torch.get_num_threads(), self.last)
            self.last = name
            self.order.append(name)

        return work


@pytest.mark.parametrize("best", [1, 2])
def test_a_contender_runs_with_the_number_of_threads_that_is_fastest(best, monkeypatch):
    machine = Machine(monkeypatch, lambda _, threads, __: 0.1 if threads == best else 0.2)
    clock = host_clock.fastest(machine.contender("a"))
    assert clock.threads == best
    assert clock.sample() == pytest.approx(0.1)
    assert torch.get_num_threads() == 2  # as before


def test_what_takes_too_long_is_not_tried_with_other_threads(monkeypatch):
    machine = Machine(monkeypatch, lambda *_: 2 * host_clock.SLOW)
    assert host_clock.fastest(machine.contender("a")).threads == 2
    assert len(machine.order) == 2  # one to load code, one to be timed


def test_threads_are_given_back_after_a_failure():
    with pytest.raises(ZeroDivisionError), host_clock.threads(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


def test_what_is_compiled_is_compiled_for_each_number_of_threads():
    """torch's loops have a fixed number of threads: it is a part of what is compiled."""
    compiled_with: list[int] = []

    def backend(module, _):
        compiled_with.append(torch.get_num_threads())
        return module.forward

    torch.compiler.reset()
    function = torch.compile(lambda x: x + 1, backend=backend)
    host_clock.fastest(lambda: function(torch.ones(2)))
    assert compiled_with == [2, 1]


def test_a_compiler_that_needs_half_a_minute_is_in_no_time(monkeypatch):
    machine = Machine(monkeypatch, lambda _, threads, __: 0.3 / threads)
    run = machine.contender("a")

    def backend(module, _):
        machine.now += 1.5 * host_clock.ENDLESS
        return module.forward

    torch.compiler.reset()
    function = torch.compile(lambda x: x + 1, backend=backend)

    def work() -> None:
        function(torch.ones(2))
        run()

    for clock in (host_clock.HostClock(work, 1), host_clock.fastest(work)):
        assert clock.sample() == pytest.approx(0.3 / clock.threads)
    assert clock.threads == 2
    torch.compiler.reset()


@pytest.mark.parametrize("company", [["b"], ["b", "c"], []])
def test_the_time_of_a_contender_does_not_depend_on_its_company(company, monkeypatch):
    """After anyone else a pass takes three times as long: cold caches, sleeping threads."""
    machine = Machine(monkeypatch, lambda name, _, last: 0.01 if name == last else 0.03)
    clocks = {name: host_clock.fastest(machine.contender(name)) for name in ["a", *company]}
    timings, _ = measure.time_interleaved(clocks, seconds=0.0)
    assert timings["a"].median == pytest.approx(0.01)


def test_short_passes_are_timed_together(monkeypatch):
    clock = host_clock.HostClock(Machine(monkeypatch, lambda *_: 1e-4).contender("a"), 1)
    assert clock.repeats in (10, 11)
    assert clock.sample() == pytest.approx(1e-4)


def test_contenders_take_turns(monkeypatch):
    machine = Machine(monkeypatch, lambda *_: 2.75)
    clocks = {n: host_clock.HostClock(machine.contender(n), 1) for n in ("a", "b")}
    machine.order.clear()
    timings, _ = measure.time_interleaved(clocks, seconds=0.0)
    assert machine.order == ["a", "b"] * 3
    assert {len(timing.times) for timing in timings.values()} == {3}


def test_who_needs_seconds_takes_part_in_two_rounds(monkeypatch):
    machine = Machine(monkeypatch, lambda name, *_: 10.0 if name == "slow" else 2.75)
    clocks = {n: host_clock.HostClock(machine.contender(n), 1) for n in ("slow", "a")}
    timings, _ = measure.time_interleaved(clocks, seconds=5.0)
    assert timings["slow"].times == [10.0, 10.0]
    assert len(timings["a"].times) == 4  # two beside it, and for five seconds alone
    assert measure.ratio_of_rounds(timings["slow"], timings["a"])[0] == pytest.approx(10.0 / 2.75)


def test_who_fails_in_a_round_leaves_the_others_their_times():
    class Fails:
        def sample(self) -> float:
            raise MemoryError("taken by others")

    clocks = {n: host_clock.HostClock(lambda: None, 1) for n in ("a", "c")}
    clocks = {"a": clocks["a"], "b": Fails(), "c": clocks["c"]}
    timings, failures = measure.time_interleaved(clocks, seconds=0.0)
    assert {name: str(failure) for name, failure in failures.items()} == {"b": "taken by others"}
    assert {name: len(timing.times) for name, timing in timings.items()} == {"a": 3, "c": 3}


def test_who_needs_half_a_minute_runs_twice_in_all(monkeypatch):
    machine = Machine(monkeypatch, lambda name, *_: 30.0 if name == "slow" else 1.0)
    clocks = {n: host_clock.fastest(machine.contender(n)) for n in ("slow", "a")}
    timings, _ = measure.time_interleaved(clocks, seconds=0.0)
    assert machine.order.count("slow") == 2
    assert timings["slow"].times == [30.0, 30.0]
    assert measure.ratio_of_rounds(timings["slow"], timings["a"])[0] == 30.0


def test_a_machine_that_is_busy_for_a_while_shows_in_the_spread_and_not_in_the_time():
    quiet, busy = [1.0, 1.01, 0.99], [3.0, 3.1, 2.9]
    timing = measure.Timing(busy * 2 + quiet)
    assert timing.median == 1.0
    assert timing.spread > 0.3
    assert measure.Timing(quiet + busy).median == pytest.approx(1.955)  # too few for parts


def test_the_speed_of_the_machine_is_a_share_of_the_best_that_was_seen(monkeypatch):
    watch = host_clock.Watch()
    times = iter([2.0, 4.0, 5.0, 0.5, 1.0, 0.7])
    watch.best = 1.0
    monkeypatch.setattr(watch, "_seconds", lambda: next(times))
    assert watch.speed() == 1.0 / 4.0
    assert watch.speed() == 1.0  # faster than ever


def row(contender: str = "a", **facts) -> record.Row:
    base = record.Row("c", "forward", contender, {}, 1.0, 0.0, 3, None, None, None, None)
    return replace(base, **facts)


def test_who_is_fastest_with_one_thread_and_when_the_machine_was_busy_stand_under_a_table():
    rows = [row("a", threads=2, speed=0.95), row("b", threads=1, speed=0.95)]
    assert list(tables.notes(rows)) == ["forward: fastest with one thread: b"]
    (line,) = tables.notes([row("a", threads=2, speed=0.61)])
    assert "61% of its best speed" in line
    assert list(tables.notes([row("a", threads=1), row("b", threads=1)])) == []  # of one core


def test_threads_and_speed_are_recorded_and_older_records_have_none(tmp_path):
    Record({}, [row(threads=1, speed=0.9)]).write(tmp_path / "new.json")
    (new,) = record.read(tmp_path / "new.json").rows
    assert (new.threads, new.speed) == (1, 0.9)
    text = (tmp_path / "new.json").read_text()
    for name in ('"threads": 1,', '"speed": 0.9'):
        assert name in text
    text = text.replace('"threads": 1,', "").replace(',\n   \n   "speed": 0.9', "")
    (tmp_path / "old.json").write_text(text)
    (old,) = record.read(tmp_path / "old.json").rows
    assert (old.threads, old.speed) == (None, None)


# A workload stands in one row.


def workload(case, entry) -> tuple[object, ...]:
    """Describe what is computed: the run, and the inputs of attention that it is given."""
    x = case.make({**entry.size, "features": 1}, CPU, torch.float32)
    assert isinstance(x, AttentionInputs)
    shape = (*x.query.shape[:-1], entry.size["features"])
    is_listed = x.graph.structure is None
    edges = x.graph.edge_index.numpy().tobytes() if is_listed else x.graph.num_edges
    return entry.run, shape, edges, str(x.graph), x.top_k, x.query is x.key


def test_no_workload_stands_in_two_rows():
    places: dict[tuple[object, ...], str] = {}
    for case in cases.CASES:
        for name, entry in case.entries("small").items():
            if {"heads", "features"} <= set(entry.size):
                work, here = workload(case, entry), f"{case.name}: {name}"
                assert places.setdefault(work, here) == here
    assert len(places) > 20


def test_twice_the_tokens_run_in_the_same_rounds_as_once():
    """The growth of time is a ratio of rounds, and no row of a case of its own."""
    case = next(case for case in cases.CASES if case.name == "causal-window")
    entries = case.entries("paper")
    once, twice = entries[OURS], entries[TWICE]
    assert (once.run, once.size["tokens"]) == (twice.run, 16384)
    assert twice.size == {**once.size, "tokens": 32768}
    assert twice.beside == OURS
    (target,) = (target for target in case.targets if target.of == TWICE)
    assert (target.over, target.at_most, target.passes) == ((OURS,), 2.2, FORWARD)
    assert causal_window(twice.size) == ga.causal_window_graph(32768, 256)
