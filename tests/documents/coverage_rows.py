"""THE table: what torch.distributed has, which tests show it here, and which lines of the documentation say it.

    python -m tests.documents.coverage_rows

prints it. test_coverage_rows.py checks that every test and every heading is there.
"""

from __future__ import annotations

from typing import Final, NamedTuple

PAGE: Final = "docs/reference/from_torch.md"


class Row(NamedTuple):
    """One row of the page. tests: file::function in tests/. lines: file#heading from the repository's root."""

    title: str
    tests: tuple[str, ...]
    lines: tuple[str, ...]


ROWS: Final[dict[int, Row]] = {
    1: Row(
        "backends, built in, registered, by device; what one cannot do is refused",
        (
            "mesh/test_torch_facts.py::test_a_registered_backend_and_one_named_by_device",
            "comm/test_all_collectives.py::test_each_mistake_is_refused_before_a_byte_moves",
            "doctor/test_doctor.py::test_a_device_or_backend_that_is_not_there",
            "documents/test_documents.py::test_a_page_that_is_made_is_what_is_made_now",
        ),
        (f"{PAGE}#1-backends", "docs/reference/support.md#what-each-backend-reduces", "docs/guide/doctor.md"),
    ),
    2: Row(
        "network interfaces, NCCL's log and sockets",
        (
            "mesh/test_meeting.py::test_network_settings_are_set_before_and_put_back_after",
            "mesh/test_meeting.py::test_an_interface_that_is_set_twice_is_refused",
            "mesh/test_torch_facts.py::test_interfaces_and_sockets_become_variables",
            "doctor/test_doctor.py::test_an_interface_set_twice_or_down_or_missing_in_the_environment",
        ),
        (f"{PAGE}#2-network", "docs/reference/config.md#network", "docs/guide/two_hosts.md"),
    ),
    3: Row(
        "joining: env, tcp, file, explicit store; timeout, device_id, options of the backend",
        (
            "mesh/test_meeting.py::test_file",
            "mesh/test_meeting.py::test_tcp",
            "mesh/test_meeting.py::test_explicit_store",
            "mesh/test_meeting.py::test_slurm",
            "mesh/test_meeting.py::test_mpi",
            "mesh/test_meeting.py::test_an_initialised_torch_distributed_is_joined_and_left_alone",
            "config/test_config.py::test_options_of_a_group",
            "config/test_config_errors.py::test_the_report_on_a_bad_config",
            "comm/test_nccl.py::test_world_size_one_on_one_gpu",
        ),
        (f"{PAGE}#3-joining-a-job", "docs/reference/config.md#process"),
    ),
    4: Row(
        "the four stores and their methods; any of them carries a mesh",
        (
            "mesh/test_store.py::test_any_store_carries_a_mesh",
            "mesh/test_store.py::test_a_hash_store_carries_a_mesh_of_one_process",
            "mesh/test_store.py::test_one_key",
            "mesh/test_store.py::test_counters",
            "mesh/test_store.py::test_append_adds_or_is_refused",
            "mesh/test_store.py::test_compare_set",
            "mesh/test_store.py::test_several_keys",
            "mesh/test_store.py::test_a_key_that_never_comes_is_named_with_the_rank_and_the_seconds",
        ),
        (f"{PAGE}#4-stores", "docs/guide/store.md#which-store-and-what-each-can-do"),
    ),
    5: Row(
        "what is available, who am I",
        (
            "doctor/test_doctor.py::test_json_has_all_keys_and_is_right_about_this_host",
            "doctor/test_doctor.py::test_every_rank_says_where_it_is",
            "mesh/test_mesh.py::test_the_plan_is_what_real_processes_create",
        ),
        (f"{PAGE}#5-who-am-i", "docs/guide/doctor.md"),
    ),
    6: Row(
        "DeviceMesh, from a mesh and to a mesh, slices",
        (
            "mesh/test_mesh.py::test_device_meshes_are_over_our_groups",
            "mesh/test_mesh.py::test_a_mesh_from_an_existing_device_mesh",
            "parallel/test_torch_parallel.py::test_fsdp_and_tensor_parallel_equal_one_process",
        ),
        (f"{PAGE}#6-devicemesh",),
    ),
    7: Row(
        "groups, their options, non-members, translation of ranks, concurrency",
        (
            "mesh/test_mesh.py::test_the_plan_is_what_real_processes_create",
            "mesh/test_mesh.py::test_group_rank_is_coord_under_every_rank_order",
            "mesh/test_mesh.py::test_create_declares_a_merged_dim_on_a_live_mesh",
            "mesh/test_mesh.py::test_meshes_on_parts_of_the_world_side_by_side",
            "simulator/test_simulator_verdicts.py::test_a_planted_bug_gets_its_verdict_and_the_corrected_program_passes",
            "mesh/test_verdicts.py::test_a_circular_wait_across_dims_is_found",
            "simulator/test_simulator_starts.py::test_asynchronous_calls_of_two_nccl_groups_in_crossed_order",
        ),
        (f"{PAGE}#7-groups", "docs/guide/groups.md"),
    ),
    8: Row(
        "closing, and opening again in one process",
        (
            "mesh/test_mesh.py::test_closing_and_opening_again_in_one_process",
            "mesh/test_teardown.py::test_twenty_cycles_return_files_and_threads",
            "mesh/test_teardown.py::test_after_an_exception_the_next_mesh_works",
        ),
        (f"{PAGE}#8-closing", "docs/guide/groups.md#opening-and-closing"),
    ),
    9: Row(
        "messages, any source, tags, group ranks",
        (
            "comm/test_collectives.py::test_against_numpy",
            "comm/test_all_collectives.py::test_empty_messages_from_whoever_comes_first",
            "mesh/test_group_ranks.py::test_dst_and_src_are_global_ranks_in_torch_and_coords_here",
        ),
        (f"{PAGE}#9-messages", "docs/guide/messages.md"),
    ),
    10: Row(
        "objects in messages: sizes first, then bytes, a cap, no pickle",
        (
            "comm/test_objects.py::test_every_call_along_every_dim_under_a_permuted_rank_order",
            "comm/test_objects.py::test_an_object_over_the_cap_raises_on_every_rank_before_its_bytes_move",
            "comm/test_objects.py::test_a_pickle_is_never_read_by_a_rank_that_did_not_ask_for_it",
        ),
        (f"{PAGE}#10-objects-in-messages", "docs/guide/objects.md#the-size-cap"),
    ),
    11: Row(
        "batches of messages, in no order that could deadlock",
        ("comm/test_collectives.py::test_against_numpy", "comm/test_message_check.py::test_equal_ends_pass"),
        (f"{PAGE}#11-batches-of-messages", "docs/guide/messages.md#several-at-once"),
    ),
    12: Row(
        "ring exchange",
        (
            "comm/test_collectives.py::test_against_numpy",
            "documents/test_examples.py::test_it_prints_what_it_says",
        ),
        (f"{PAGE}#12-a-ring", "docs/guide/messages.md#rings-and-lines"),
    ),
    13: Row(
        "asynchronous calls and what their handles say",
        (
            "comm/test_collectives.py::test_against_numpy",
            "comm/test_all_collectives.py::test_handles_say_what_became_of_the_call",
            "mesh/test_verdicts.py::test_calls_that_were_never_compared_name_who_has_not_come_too",
        ),
        (f"{PAGE}#13-asynchronous-calls", "docs/guide/collectives.md#asynchronous-calls"),
    ),
    14: Row(
        "every collective: uneven, complex, lists, preallocated",
        (
            "comm/test_collectives.py::test_against_numpy",
            "comm/test_all_collectives.py::test_against_numpy",
            "simulator/test_programs.py::test_random_programs",
        ),
        (f"{PAGE}#14-collectives", "docs/guide/collectives.md"),
    ),
    15: Row(
        "object collectives",
        (
            "comm/test_objects.py::test_every_call_along_every_dim_under_a_permuted_rank_order",
            "comm/test_objects.py::test_an_object_that_cannot_be_sent_raises_on_every_rank",
        ),
        (f"{PAGE}#15-object-collectives", "docs/guide/objects.md"),
    ),
    16: Row(
        "barriers that name who did not come",
        ("mesh/test_barrier.py::test_who_did_not_come",),
        (f"{PAGE}#16-barriers", "docs/guide/hangs.md"),
    ),
    17: Row(
        "reduce operations, emulated where exact, refused where not",
        (
            "comm/test_all_collectives.py::test_every_reduce_op_and_dtype",
            "mesh/test_group_ranks.py::test_gloo_has_avg_and_reduce_scatter",
            "documents/test_documents.py::test_a_page_that_is_made_is_what_is_made_now",
        ),
        (f"{PAGE}#17-reduce-operations", "docs/reference/support.md#what-each-backend-reduces"),
    ),
    18: Row(
        "profiling: labels with op, dims and plan; one trace of all ranks",
        (
            "comm/test_all_collectives.py::test_the_profiler_sees_op_dims_and_plan",
            "mesh/test_trace.py::test_the_file_is_what_chrome_reads",
            "mesh/test_trace.py::test_the_events_are_the_calls_that_were_made",
        ),
        (f"{PAGE}#18-profiling", "docs/guide/timeline.md"),
    ),
    19: Row(
        "launchers",
        (
            "mesh/test_torch_facts.py::test_torchs_spawn",
            "jobs/test_jobs.py::test_run_gives_a_script_its_mesh_and_its_arguments",
            "launch/test_orphans.py::test_a_torchrun_of_ones_own_restarts_and_tells_each_error_once",
            "mesh/test_launcher.py::test_each_launcher",
            "mesh/test_meeting.py::test_slurm",
            "mesh/test_meeting.py::test_mpi",
            "two_hosts/test_two_hosts.py::test_the_same_line_on_both_hosts",
        ),
        (f"{PAGE}#19-launchers", "docs/guide/launching.md", "docs/guide/two_hosts.md"),
    ),
    20: Row(
        "debugging: breakpoint, torch's levels, validation, hang reports, logs by coords",
        (
            "mesh/test_breakpoint.py::test_one_rank_stops_and_the_others_wait",
            "mesh/test_torch_facts.py::test_torchs_own_checks_may_be_on",
            "comm/test_mismatch.py::test_a_difference_is_named_on_every_rank_of_the_group",
            "mesh/test_verdicts.py::test_a_skipped_call_names_who_has_not_come",
            "mesh/test_logs.py::test_only_the_ranks_that_are_asked_for_write",
            "mesh/test_logs.py::test_every_line_has_the_prefix",
        ),
        (f"{PAGE}#20-debugging", "docs/guide/hangs.md", "docs/guide/logs.md"),
    ),
    21: Row(
        "parameters without a gradient, and what is sent in which bucket",
        (
            "parallel/test_parallel.py::test_what_goes_wrong_within_a_step_is_named",
            "parallel/test_parallel.py::test_gradients_are_the_sum_over_the_whole_batch",
        ),
        (f"{PAGE}#21-unused-parameters",),
    ),
    22: Row(
        "torch's errors as causes of ours",
        (
            "mesh/test_torch_facts.py::test_what_torch_raised_is_the_cause",
            "mesh/test_verdicts.py::test_a_dead_peer_is_named",
        ),
        (f"{PAGE}#22-errors", "docs/reference/faults.md"),
    ),
    23: Row(
        "first programs: who is there, halves, chains, sums, softmax, broadcasts, scatter's memory",
        (
            "documents/test_examples.py::test_it_prints_what_it_says",
            "documents/test_examples.py::test_what_scatter_allocates",
        ),
        (f"{PAGE}#23-first-programs",),
    ),
    24: Row(
        "groups of some ranks with a timeout, non-members, group ranks, object lists, a batched ring",
        (
            "documents/test_examples.py::test_it_prints_what_it_says",
            "mesh/test_group_ranks.py::test_dst_and_src_are_global_ranks_in_torch_and_coords_here",
            "mesh/test_mesh.py::test_meshes_on_parts_of_the_world_side_by_side",
        ),
        (f"{PAGE}#24-groups-of-some-ranks", f"{PAGE}#two-errors-of-the-literature"),
    ),
    25: Row(
        "ring, tree and double tree: steps, bytes, times; 180 ms against 1 ms",
        (
            "algorithms/test_algorithms.py::test_algorithms_on_gloo",
            "algorithms/test_algorithms.py::test_the_simulator_counts_what_the_formulas_say",
            "algorithms/test_algorithms.py::test_the_guide_has_the_tables_of_the_formulas",
            "costs/test_costs.py::test_24576_ranks_take_180_ms_by_ring_and_1_ms_by_double_tree_with_the_stated_constants",
        ),
        (f"{PAGE}#25-ring-or-tree", "docs/guide/algorithms.md#24576-gpus-180-ms-against-1-ms"),
    ),
    26: Row(
        "ranks and devices",
        (
            "mesh/test_torch_facts.py::test_more_ranks_than_devices_are_refused_before_a_group_exists",
            "comm/test_nccl.py::test_more_ranks_than_devices_are_refused",
            "topology/test_topology.py::test_more_ranks_than_devices",
        ),
        (f"{PAGE}#26-processes-and-devices",),
    ),
}


def main() -> None:
    """Print the table."""
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table("#", "what", show_lines=True)
    for name in ("tests", "documentation"):
        table.add_column(name, overflow="fold")
    for number, row in ROWS.items():
        table.add_row(str(number), row.title, "\n".join(row.tests), "\n".join(row.lines))
    # Into a file or a log: wide enough for the longest name.
    Console(width=None if sys.stdout.isatty() else 240).print(table)


if __name__ == "__main__":
    main()
