"""What all tests share: the plugin's pool of warm ranks, and figures for the end of the log."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshcomm.testing import Pool
from meshcomm.train.parity import Difference
from tests.train.parity_page import write_page

# They need packages that nothing else does.
collect_ignore = ["benchmarks/torchtitan.py", "launchers"]

# torch's store looks up the name of every address that connects. A name server that does not answer
# must not cost each test five seconds; read when the first name is looked up, so set before that.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# Where it is set, as in many container images, each of some hundred processes would compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What a terminal, a scheduler or a job around the tests says to the programs in it. What is tested here is to
# see what its test says, and nothing of these.
_OF_TERMINALS = (
    "COLUMNS", "LINES", "TERMINAL_WIDTH", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS",
    "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS",
)  # fmt: skip
_OF_JOBS = re.compile(
    # Those two say to the tests of tests/foreign where things are.
    r"(?!MESHCOMM_(FOREIGN|PICOTRON)$)"
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|(MESHCOMM|SLURM|OMPI|PMI|PMIX|MPI|MV2|I_MPI|FLUX|JSM|PALS|RAY|TORCHELASTIC|TORCH_ELASTIC|TORCH_DISTRIBUTED|GLOO|NCCL)_\w+)"
)

# The files that take longest, longest first. One that began last would leave the other process without work.
LONGEST = (
    "train/test_pretrained.py", "mesh/test_endings.py", "comm/test_counters.py", "faults/test_faults.py",
    "train/test_training_state.py", "models/test_families.py", "commands/test_run.py",
    "rendezvous/test_two_jobs.py", "train/test_parity.py", "train/test_early_stop.py", "dryrun/test_dryrun.py",
    "train/test_evaluate.py", "train/test_nonfinite.py", "comm/test_functional.py",
    "documents/test_finetune_llama.py", "train/test_checkpoint.py", "parallel/test_random_numbers.py",
    "documents/test_documented_blocks.py", "train/test_number_types.py", "mesh/test_verdicts.py",
    "documents/test_examples.py", "train/test_cost.py", "train/test_queued_steps.py",
    "train/test_optimizers.py", "commands/test_wrong_files.py", "comm/test_collectives.py",
    "testing/test_emulated_nccl.py", "parallel/test_recompute.py", "mesh/test_opening_counts.py",
    "parallel/test_context_kernels.py", "testing/test_plugin.py", "train/test_random_configs.py",
    "train/test_checkpoint_state.py", "dryrun/test_rank.py", "train/test_training.py",
    "job/test_launch.py", "parallel/test_context.py", "benchmarks/test_training.py",
    "mesh/test_queued_calls.py",
)  # fmt: skip

# Cases that others of their file stand for in the gate: by file, which. They are deep.
FURTHER = {
    "comm/test_collectives.py": r"against_numpy\[hierarchical",
    "comm/test_compiled.py": r"graph_without_tangents|rearrange_and_shift_compile",
    "comm/test_counters.py": r"same_counts_and_the_time_on_real_ranks",
    "comm/test_functional.py": r"in_one_graph\[vmap|eager\[make_fx",
    "comm/test_objects.py": r"rank_order\[emulated_nccl",
    "config/test_schema.py": r"checked_strictly",
    "documents/test_examples.py": r"says\[(bring_your_own_model|hybrid_training)",
    "documents/test_project.py": r"a_release_is_checked",
    "documents/test_wheel.py": r"away_from_the_clone",
    "dryrun/test_model.py": r"config_json_is_run_dry",
    "dryrun/test_rank.py": r"of_a_folder_of_transformers",
    "dryrun/test_torch_programs.py": r"large_world_of_a_device_mesh|processes_call\[fsdp, tensor",
    "elastic/test_replaced.py": r"loop_of_ones_own_meets|does_not_reopen_ends",
    "elastic/test_simulated_losses.py": r"begin_again_in_another_order",
    "elastic/test_simulated_smaller.py": r"a_training_grows_back",
    "elastic/test_smaller.py": r"loop_of_ones_own_goes_on",
    "faults/test_faults.py": r"short_form\[bare-(fsdp-skip|new-group-exits)",
    "mesh/test_endings.py": r"ended_well_too_early\[ddp\]|slice_of_a_device_mesh_is_refused",
    "mesh/test_opening_counts.py": r"reads_the_list\[131072",
    "mesh/test_watched.py": r"left_alone\[(pipeline|groups|fsdp, tensor)|know_meshcomm\[fsdp, tensor-kill",
    "models/test_any_family.py": r"itself\[(minimax_m2|qwen2_moe|glm4|granite_swa|olmo2|cohere2|gemma3_text|mixtral|phi3|deepseek_v3)\]|bits\[(gpt2|mixtral)\]",
    "models/test_any_module.py": r"on_a_mesh\[.*(as_it_is.*(tp=2|pp=2 fsdp=2)|alone|placed)",
    "models/test_families.py": r"on_a_mesh\[(qwen3(_moe)?-|gpt2-pp=2 tp=2)|sends\[(ulysses|ring)\]",
    "parallel/test_random_numbers.py": r"one_process_draws\[.*alone",
    "testing/test_emulated_nccl.py": r"test_emulated\[compiled(_step)?\]",
    "testing/test_plugin.py": r"a_suite\[gloo",
    "train/test_checkpoint.py": r"fits_any_mesh\[\{ pp = 1",
    "train/test_cost.py": r"multiply_add\[((dp=2 tp|fsdp=2 cp)=2|pp=2)",
    "train/test_documents.py": r"\[llama, pp2 tp2\]|\[cp2 ulysses\]",
    "train/test_evaluate.py": r"every_mesh\[pp=2 fsdp=2",
    "train/test_frozen.py": r"a_model_has_frozen_itself|one_process\[fsdp4",
    "train/test_loading.py": r"without_reading_again\[(3-(its|torchdata|wraps)|5-(its|torchdata|without)|7)|workers_stay",
    "train/test_lora.py": r"goes_on_elsewhere|\[dropout|frozen_weights_are_held|one_process\[own, pp2 tp2 seq",
    "train/test_nonfinite.py": r"is_not_saved\[\{ pp = 2, dp = 2",
    "train/test_number_types.py": r"\[(pp2 tp2 sequence recompute|True-1f1b|False-zero_bubble)",
    "train/test_optimizers.py": r"of_another_type|moments_in_bfloat16",
    "train/test_original.py": r"around_its_blocks",
    "train/test_parity.py": r"\[(shard2 tp2|shard4 ep2|shard2 cp2 ulysses|shard4 ep4 capacity|pp2 tp2 sequence recompute)\]",
    "train/test_pretrained.py": r"layout_of_weights|as_it_went_in\[dims[01]|bfloat16_becomes_float32",
    "train/test_queued_steps.py": r"waits_for_nothing\[fsdp\]",
    "train/test_signals.py": r"two moments",
    # The gate runs the README's first command, which is the same training.
    "train/test_training.py": r"the_quickstart_learns",
    "train/test_training_state.py": r"bit_equal\[module-fsdp=2-dp=2 tp=2",
}

_TESTS = Path(__file__).parent
_FIGURE = "measured"
_ROWS: pytest.StashKey[list[tuple[str, Difference]]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option that makes a page of what was measured."""
    parser.addoption(
        "--write-parity-table",
        action="store_true",
        help="with -m parity: write the table of docs/guide/parity.md from what the meshes gave",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to make the page in parts."""
    if config.getoption("--write-parity-table") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--write-parity-table needs the rows of one process: add -n 0")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the sets that take minutes have one name together: `-m deep`."""
    place = {_TESTS / file: at for at, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    further = {_TESTS / file: re.compile(names) for file, names in FURTHER.items()}
    for item in items:
        found = item.path in further and further[item.path].search(item.name)
        if found or any(item.get_closest_marker(name) for name in ("faults", "parity", "netns")):
            item.add_marker("deep")


def pytest_sessionstart() -> None:
    """Forget what is around the tests; pytest has read by now what it needs of it."""
    for name in list(os.environ):
        if name in _OF_TERMINALS or _OF_JOBS.fullmatch(name):
            del os.environ[name]
    # A job in the background, or under nohup, is started with these ignored, and so would be every rank.
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGQUIT: signal.SIG_DFL,
    }
    for number, handler in usual.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session")
def pool(mesh_pool: Pool) -> Pool:
    """Warm ranks for tests that open their meshes themselves; the plugin's, shared with its tests."""
    return mesh_pool


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Takes lines with measured figures; they stand at the end of the test log."""
    return lambda line: request.node.user_properties.append((_FIGURE, line))


@pytest.fixture
def parity_rows(pytestconfig: pytest.Config) -> list[tuple[str, Difference]]:
    """Takes (case, its worst difference from one process), for the table of combinations."""
    return pytestconfig.stash.setdefault(_ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures, and make a page of them where that is asked for."""
    # In the reports of the tests, as these come from the processes that ran them.
    reports = [report for each in terminalreporter.stats.values() for report in each]
    properties = [each for report in reports for each in getattr(report, "user_properties", ())]
    lines = dict.fromkeys(line for name, line in properties if name == _FIGURE)
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.write_line(line)
    if config.getoption("--write-parity-table"):
        terminalreporter.write_line(write_page(dict(config.stash.get(_ROWS, []))))
