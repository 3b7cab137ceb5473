"""Every study makes a page with a picture from any results; bad names are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from themis.cli.main import main
from themis.core.errors import ConfigError
from themis.policies import POLICIES
from themis.report import assumptions
from themis.report.claims import tally
from themis.report.jobs import Job, run_jobs, simulate
from themis.report.page import write_page
from themis.report.reproduce import claims_page, studies
from themis.report.studies import ablation, end_to_end, memory, routing, sensitivity
from themis.sim.results import Result

COMMON_BATCH = assumptions.common_batch


class Quick(dict[Job, Result]):
    """Results of one layer, one iteration, one node, made as they are asked for."""

    def __missing__(self, job: Job) -> Result:
        layers = job.workload().model.num_layers
        result = simulate(replace(job, iterations=1, warmup=1, layers=1, nodes=min(job.nodes, 2) or 2, batch=8))
        result = replace(result, layer_s=result.layer_s.repeat(layers))
        return self.setdefault(job, result)


@pytest.fixture(scope="module")
def quick():
    with pytest.MonkeyPatch.context() as patch:
        for module in (assumptions, ablation, end_to_end, memory, routing, sensitivity):
            patch.setattr(module, "common_batch", lambda model, place: 1, raising=False)
        patch.setattr(sensitivity, "VARIATIONS", sensitivity.VARIATIONS[:3])
        yield Quick()


NEEDS_BASELINES = pytest.mark.skipif(
    not {*assumptions.SYSTEMS, *assumptions.RIVALS} <= set(POLICIES), reason="not every policy of figure 9 is there"
)


@NEEDS_BASELINES
@pytest.mark.parametrize("key", studies())
def test_every_study_makes_a_page(quick, tmp_path, key):
    study = studies()[key]
    page = study.page(quick)
    assert page.key == study.key == key
    written = write_page(page, tmp_path)
    assert written[-1].stat().st_size > 100
    assert set(study.jobs()) <= set(quick) or key in ("fig13b", "scaling")


@NEEDS_BASELINES
def test_there_are_claims_enough(quick):
    page = claims_page([study.page(quick) for study in studies().values()])
    assert tally(page.claims)[1] >= 40
    assert len(page.orderings) >= 18
    keys = [claim.key for claim in page.claims] + [ordering.key for ordering in page.orderings]
    assert len(keys) == len(set(keys))


def test_the_batch_is_the_largest_that_all_systems_run(monkeypatch):
    most = {"ep": 4, "faster-moe": 5, "smart-moe": 4, "flex-moe": 3, "themis": 6, "themis-rm": 6, "uniform": 9}
    monkeypatch.setattr(assumptions, "largest_batch", lambda model, place, policy: most[policy])
    COMMON_BATCH.cache_clear()
    monkeypatch.setattr(assumptions, "POLICIES", most)
    assert COMMON_BATCH("gpt-s-moe", "a") == 3
    COMMON_BATCH.cache_clear()


def test_jobs_run_once_each_here_or_elsewhere():
    job = Job("gpt-s-moe", "a", "ep", 1, 0.01, layers=1, iterations=1, warmup=0)
    told = []
    here = run_jobs([job, job, replace(job, seed=1)], 1, lambda done, count: told.append((done, count)))
    there = run_jobs([job, replace(job, seed=1)], 2, lambda done, count: None)
    assert told == [(1, 2), (2, 2)]
    assert {key: result.iteration_s for key, result in here.items()} == {k: r.iteration_s for k, r in there.items()}


def test_a_policy_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="policy 'best' is unknown; there are ep"):
        simulate(Job("gpt-s-moe", "a", "best", 1, 0.01))


def test_hardware_can_be_changed():
    job = Job("gpt-s-moe", "a", "ep", 1, 0.01, hardware=(("devices_per_uplink", 2), ("device.memory_bytes", 7)))
    cluster = job.workload().cluster
    assert (cluster.devices_per_uplink, cluster.device.memory_bytes, cluster.name) == (2, 7, "a")


def test_the_command_writes_pages_and_claims(tmp_path, capsys):
    assert main(["reproduce", "fig15", "--out", str(tmp_path / "out"), "--processes", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["counted"] == 3
    assert {claim["key"] for claim in facts["claims"]} == {"r2", "plan_low", "plan_high", "plan_p95"}
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["claims.md", "fig15.md", "fig15.png"]
    assert main(["reproduce", "fig15", "--out", str(tmp_path / "out"), "--processes", "1"]) == 0
    assert "Median time of a plan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig8"], "figure 'fig8' is unknown; there are fig9"),
        (["fig15", "--processes", "-1"], "processes is -1"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(["reproduce", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_directory_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["reproduce", "fig15", "--out", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be made" in capsys.readouterr().err
