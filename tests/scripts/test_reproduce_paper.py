"""The paper's figures as committed: the page is what the results say, and they are as near the paper as is claimed."""

from __future__ import annotations

import json

import pytest
from paper_pages import write_page
from paper_plots import PLOTS, draw_plots
from reproduce_paper import FIGURES

from jpaged.simulation.beam_parents import recorded_parents
from jpaged.simulation.paper import block_size, latency, swapping
from jpaged.simulation.paper.memory import FIG13, PARTS
from jpaged.simulation.paper.reasons import hold_steady
from jpaged.simulation.paper.setting import LABELS, draw, find_sustained, serve, trace_curves
from jpaged.simulation.paper.sharing import LABELS16, prefix_jobs, prefix_ratios


@pytest.fixture(scope="module")
def results(root):
    return json.loads((root / "docs" / "results" / "paper.json").read_text())


def test_the_page_is_written_from_the_results(root, results, tmp_path):
    assert set(results) == set(FIGURES)
    write_page(results, tmp_path / "paper.md")
    text = (tmp_path / "paper.md").read_text()
    assert text == (root / "docs" / "paper.md").read_text()
    for name in PLOTS:
        assert f"figures/paper_fig{name}.png" in text and (root / "docs" / "figures" / f"paper_fig{name}.png").exists()


def test_plots_are_drawn_from_the_results(results, tmp_path):
    pytest.importorskip("matplotlib")
    draw_plots({"19": results["19"], "16": results["16"]}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["paper_fig16.png", "paper_fig19.png"]


def test_memory_is_within_a_tenth_of_the_paper(results):
    ours = [row for row in results["2"]["tables"]["memory"] if row["lengths"] == "sharegpt"]
    batches = results["13"]["tables"]["batches"]
    assert len(ours) == 4 and len(batches) == 10
    for row in ours[:3]:
        assert [row[part] for part in PARTS] == pytest.approx(row["paper"], rel=0.1)
    assert ours[3]["token_states"] >= ours[3]["paper"][0]
    for row in batches:
        if row["system"].startswith("Orca"):
            assert row["batch"] == pytest.approx(row["paper"], rel=0.1)
        elif row["system"].endswith("full"):
            assert row["batch"] >= row["paper"]


def test_several_outputs_gain_more_than_one(results):
    rows = latency.sustained([*results["12"]["tables"]["latencies"], *results["14"]["tables"]["latencies"]])
    gains = {
        (row["method"], row["outputs"]): row["ratio"]
        for row in rows
        if row["lengths"] == "alpaca" and row["system"] == LABELS["oracle"]
    }
    assert gains["one", 1] == pytest.approx(1.3, rel=0.15)
    for method in ("parallel", "beam"):
        assert gains["one", 1] < gains[method, 2] < min(gains[method, 4], gains[method, 6])


def test_a_longer_prefix_gains_more(results):
    ratios = {
        (row["prefix"], row["system"]): row["ratio"] for row in prefix_ratios(results["16"]["tables"]["latencies"])
    }
    measured = {row["prefix"]: row["ratio"] for row in results["16"]["tables"]["measured"]}
    for system in (LABELS16["oracle"], LABELS16["jpaged unshared"]):
        assert 1 < ratios[80, system] < ratios[341, system]
    assert 1 < measured[80] < measured[341]


def test_swapping_small_blocks_is_slow_and_recomputing_does_not_depend_on_them(results):
    rows = results["19"]["tables"]["simulated"]
    assert [row["block size"] for row in rows] == list(swapping.BLOCK_SIZES)
    assert len({row["compute ms"] for row in rows}) == 1
    ways = [2 * row["one way ms"] for row in rows]
    assert ways == sorted(ways, reverse=True) and ways[0] > 5 * rows[0]["compute ms"]
    for row in rows:
        if 16 <= row["block size"] <= 64:
            assert 0.5 < 2 * row["one way ms"] / row["compute ms"] < 2


def test_large_blocks_cost_short_sequences_more(results):
    rows = {(row["lengths"], row["block size"]): row["memory only"] for row in results["18"]["tables"]["latencies"]}
    worst = {name: rows[name, 256] / rows[name, 16] for name in block_size.RATES}
    assert worst["alpaca"] > worst["sharegpt"] > 1


@pytest.mark.parametrize("system", ["max", "pow2", "oracle"])
def test_a_shorter_run_says_the_same(system):
    report = serve(system, draw("sharegpt", 2.0, 300.0), since=60, until=300, stop_at=300)
    assert LABELS[system].startswith("Orca")
    assert report.mean_batch == pytest.approx(FIG13["sharegpt"][system], rel=0.1)


def test_what_a_prefix_shares():
    jobs = prefix_jobs(341, 2.0)[:30]
    assert min(job.prompt for job in jobs) > 341
    shared = serve("jpaged", jobs, caching=True)
    assert 0.7 < shared.hit_rate < 336 / 341  # 21 whole blocks of each prompt but the first


def test_where_a_line_is_crossed():
    assert find_sustained([(1.0, 0.1), (2.0, 0.5)], 0.3) == pytest.approx(1.5)
    assert find_sustained([(1.0, 0.1), (2.0, 0.2)], 0.3) == 2.0
    assert find_sustained([(1.0, 0.4), (2.0, 0.5)], 0.3) == 1.0


def test_where_a_curve_crosses_the_limit_is_found():
    curves = trace_curves(grow_to_limit, [(1.0,), (5.0,)], [(0.5, 3.0), (1.0, 7.0)], rounds=4)
    for points, rate in zip(curves, (1.0, 5.0), strict=True):
        assert len(points) == 9 and points == sorted(points)
        assert find_sustained(points) == pytest.approx(rate, rel=0.01)
    with pytest.raises(ValueError, match="look below"):
        trace_curves(grow_to_limit, [(1.0,)], [(1.5, 3.0)], rounds=1)


def grow_to_limit(limit: float, rate: float) -> float:
    """A latency that is 0.3 at `limit` and grows with the rate ever faster."""
    return 0.3 * (rate / limit) ** 3


def test_held_steady_beams_share_less_and_orca_may_pay_for_copies():
    parents = recorded_parents()
    assert hold_steady(parents, 0.0).groups == parents.groups
    steady = hold_steady(parents, 1.0)
    assert {each for record in steady.groups[4] for each in record[1:]} == {(0, 1, 2, 3)}
    jobs = draw("alpaca", 4.0, 10.0, outputs=4, beams=True)
    saved = [serve("jpaged", jobs, parents=each).mean_saved for each in (parents, hold_steady(parents, 0.7), steady)]
    assert saved == sorted(saved, reverse=True) and saved[0] > 1.2 * saved[2]
    free, paid, still = (serve("oracle", jobs, parents=each).seconds for each in (None, parents, steady))
    assert free == still < paid
