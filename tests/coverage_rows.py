"""THE table: what torch.distributed has, which tests show it here, and which lines of the documentation say it.

    python -m tests.coverage_rows

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
            "test_torch_facts.py::test_a_registered_backend_and_one_named_by_device",
            "test_all_collectives.py::test_each_mistake_is_refused_before_a_byte_moves",
            "test_doctor.py::test_a_device_or_backend_that_is_not_there",
            "test_documents.py::test_a_page_that_is_made_is_what_is_made_now",
        ),
        (f"{PAGE}#1-backends", "docs/reference/support.md#what-each-backend-reduces", "docs/guide/doctor.md"),
    ),
    2: Row(
        "network interfaces, NCCL's log and sockets",
        (
            "test_meeting.py::test_network_settings_are_set_before_and_put_back_after",
            "test_meeting.py::test_an_interface_that_is_set_twice_is_refused",
            "test_torch_facts.py::test_interfaces_and_sockets_become_variables",
            "test_doctor.py::test_an_interface_set_twice_or_down_or_missing_in_the_environment",
        ),
        (f"{PAGE}#2-network", "docs/reference/config.md#network", "docs/guide/two_hosts.md"),
    ),
    3: Row(
        "joining: env, tcp, file, explicit store; timeout, device_id, options of the backend",
        (
            "test_meeting.py::test_file",
            "test_meeting.py::test_tcp",
            "test_meeting.py::test_explicit_store",
            "test_meeting.py::test_slurm",
            "test_meeting.py::test_mpi",
            "test_meeting.py::test_an_initialised_torch_distributed_is_joined_and_left_alone",
            "test_config.py::test_options_of_a_group",
            "test_config_errors.py::test_the_report_on_a_bad_config",
            "test_nccl.py::test_world_size_one_on_one_gpu",
        ),
        (f"{PAGE}#3-joining-a-job", "docs/reference/config.md#process"),
    ),
    4: Row(
        "the four stores and their methods; any of them carries a mesh",
        (
            "test_store.py::test_any_store_carries_a_mesh",
            "test_store.py::test_a_hash_store_carries_a_mesh_of_one_process",
            "test_store.py::test_one_key",
            "test_store.py::test_counters",
            "test_store.py::test_append_adds_or_is_refused",
            "test_store.py::test_compare_set",
            "test_store.py::test_several_keys",
            "test_store.py::test_a_key_that_never_comes_is_named_with_the_rank_and_the_seconds",
        ),
        (f"{PAGE}#4-stores", "docs/guide/store.md#which-store-and-what-each-can-do"),
    ),
    5: Row(
        "what is available, who am I",
        (
            "test_doctor.py::test_json_has_all_keys_and_is_right_about_this_host",
            "test_doctor.py::test_every_rank_says_where_it_is",
            "test_mesh.py::test_the_plan_is_what_real_processes_create",
        ),
        (f"{PAGE}#5-who-am-i", "docs/guide/doctor.md"),
    ),
    6: Row(
        "DeviceMesh, from a mesh and to a mesh, slices",
        (
            "test_mesh.py::test_device_meshes_are_over_our_groups",
            "test_mesh.py::test_a_mesh_from_an_existing_device_mesh",
            "test_torch_parallel.py::test_fsdp_and_tensor_parallel_equal_one_process",
        ),
        (f"{PAGE}#6-devicemesh",),
    ),
    7: Row(
        "groups, their options, non-members, translation of ranks, concurrency",
        (
            "test_mesh.py::test_the_plan_is_what_real_processes_create",
            "test_mesh.py::test_group_rank_is_coord_under_every_rank_order",
            "test_mesh.py::test_create_declares_a_merged_dim_on_a_live_mesh",
            "test_mesh.py::test_meshes_on_parts_of_the_world_side_by_side",
            "test_simulator_verdicts.py::test_a_planted_bug_gets_its_verdict_and_the_corrected_program_passes",
            "test_verdicts.py::test_a_circular_wait_across_dims_is_found",
            "test_simulator_starts.py::test_asynchronous_calls_of_two_nccl_groups_in_crossed_order",
        ),
        (f"{PAGE}#7-groups", "docs/guide/groups.md"),
    ),
    8: Row(
        "closing, and opening again in one process",
        (
            "test_mesh.py::test_closing_and_opening_again_in_one_process",
            "test_teardown.py::test_fifty_cycles_return_files_and_threads",
            "test_teardown.py::test_after_an_exception_the_next_mesh_works",
        ),
        (f"{PAGE}#8-closing", "docs/guide/groups.md#opening-and-closing"),
    ),
    9: Row(
        "messages, any source, tags, group ranks",
        (
            "test_collectives.py::test_messages",
            "test_all_collectives.py::test_messages_of_unknown_shape_and_source",
            "test_group_ranks.py::test_dst_and_src_are_global_ranks_in_torch_and_coords_here",
        ),
        (f"{PAGE}#9-messages", "docs/guide/messages.md"),
    ),
    10: Row(
        "objects in messages: sizes first, then bytes, a cap, no pickle",
        (
            "test_objects.py::test_every_call_along_every_dim_under_a_permuted_rank_order",
            "test_objects.py::test_an_object_over_the_cap_raises_on_every_rank_before_its_bytes_move",
            "test_objects.py::test_a_pickle_is_never_read_by_a_rank_that_did_not_ask_for_it",
        ),
        (f"{PAGE}#10-objects-in-messages", "docs/guide/objects.md#the-size-cap"),
    ),
    11: Row(
        "batches of messages, in no order that could deadlock",
        ("test_collectives.py::test_messages", "test_message_check.py::test_equal_ends_pass"),
        (f"{PAGE}#11-batches-of-messages", "docs/guide/messages.md#several-at-once"),
    ),
    12: Row(
        "ring exchange",
        ("test_collectives.py::test_messages", "test_examples.py::test_it_prints_what_it_says"),
        (f"{PAGE}#12-a-ring", "docs/guide/messages.md#rings-and-lines"),
    ),
    13: Row(
        "asynchronous calls and what their handles say",
        (
            "test_collectives.py::test_handles",
            "test_all_collectives.py::test_handles_say_what_became_of_the_call",
            "test_verdicts.py::test_an_asynchronous_call_fails_by_name_too",
        ),
        (f"{PAGE}#13-asynchronous-calls", "docs/guide/collectives.md#asynchronous-calls"),
    ),
    14: Row(
        "every collective: uneven, complex, lists, preallocated",
        (
            "test_collectives.py::test_all_reduce",
            "test_collectives.py::test_broadcast_gather_scatter_all_to_all",
            "test_all_collectives.py::test_gather_and_scatter",
            "test_all_collectives.py::test_uneven_sizes",
            "test_all_collectives.py::test_preallocated_results",
            "test_all_collectives.py::test_lists_travel_together",
            "test_programs.py::test_random_programs",
        ),
        (f"{PAGE}#14-collectives", "docs/guide/collectives.md"),
    ),
    15: Row(
        "object collectives",
        (
            "test_objects.py::test_every_call_along_every_dim_under_a_permuted_rank_order",
            "test_objects.py::test_an_object_that_cannot_be_sent_raises_on_every_rank",
        ),
        (f"{PAGE}#15-object-collectives", "docs/guide/objects.md"),
    ),
    16: Row(
        "barriers that name who did not come",
        ("test_barrier.py::test_who_did_not_come",),
        (f"{PAGE}#16-barriers", "docs/guide/hangs.md"),
    ),
    17: Row(
        "reduce operations, emulated where exact, refused where not",
        (
            "test_all_collectives.py::test_every_reduce_op_and_dtype",
            "test_group_ranks.py::test_gloo_has_avg_and_reduce_scatter",
            "test_documents.py::test_a_page_that_is_made_is_what_is_made_now",
        ),
        (f"{PAGE}#17-reduce-operations", "docs/reference/support.md#what-each-backend-reduces"),
    ),
    18: Row(
        "profiling: labels with op, dims and plan; one trace of all ranks",
        (
            "test_all_collectives.py::test_the_profiler_sees_op_dims_and_plan",
            "test_trace.py::test_the_file_is_what_chrome_reads",
            "test_trace.py::test_the_events_are_the_calls_that_were_made",
        ),
        (f"{PAGE}#18-profiling", "docs/guide/timeline.md"),
    ),
    19: Row(
        "launchers",
        (
            "test_torch_facts.py::test_torchs_own_launchers",
            "test_jobs.py::test_run_gives_a_script_its_mesh_and_its_arguments",
            "test_orphans.py::test_a_torchrun_of_ones_own_restarts_and_tells_each_error_once",
            "test_launcher.py::test_each_launcher",
            "test_meeting.py::test_slurm",
            "test_meeting.py::test_mpi",
            "two_hosts/test_two_hosts.py::test_the_same_line_on_both_hosts",
        ),
        (f"{PAGE}#19-launchers", "docs/guide/launching.md", "docs/guide/two_hosts.md"),
    ),
    20: Row(
        "debugging: breakpoint, torch's levels, validation, hang reports, logs by coords",
        (
            "test_breakpoint.py::test_one_rank_stops_and_the_others_wait",
            "test_torch_facts.py::test_torchs_own_checks_may_be_on",
            "test_mismatch.py::test_a_difference_is_named_on_every_rank_of_the_group",
            "test_verdicts.py::test_a_skipped_call_names_who_has_not_come",
            "test_logs.py::test_only_the_ranks_that_are_asked_for_write",
            "test_logs.py::test_every_line_has_the_prefix",
        ),
        (f"{PAGE}#20-debugging", "docs/guide/hangs.md", "docs/guide/logs.md"),
    ),
    21: Row(
        "parameters without a gradient, and what is sent in which bucket",
        (
            "test_parallel.py::test_what_goes_wrong_within_a_step_is_named",
            "test_parallel.py::test_gradients_are_the_sum_over_the_whole_batch",
        ),
        (f"{PAGE}#21-unused-parameters",),
    ),
    22: Row(
        "torch's errors as causes of ours",
        (
            "test_torch_facts.py::test_what_torch_raised_is_the_cause",
            "test_verdicts.py::test_a_dead_peer_is_named",
        ),
        (f"{PAGE}#22-errors", "docs/reference/faults.md"),
    ),
    23: Row(
        "first programs: who is there, halves, chains, sums, softmax, broadcasts, scatter's memory",
        (
            "test_examples.py::test_it_prints_what_it_says",
            "test_examples.py::test_what_scatter_allocates",
        ),
        (f"{PAGE}#23-first-programs",),
    ),
    24: Row(
        "groups of some ranks with a timeout, non-members, group ranks, object lists, a batched ring",
        (
            "test_examples.py::test_it_prints_what_it_says",
            "test_group_ranks.py::test_dst_and_src_are_global_ranks_in_torch_and_coords_here",
            "test_mesh.py::test_meshes_on_parts_of_the_world_side_by_side",
        ),
        (f"{PAGE}#24-groups-of-some-ranks", f"{PAGE}#two-errors-of-the-literature"),
    ),
    25: Row(
        "ring, tree and double tree: steps, bytes, times; 180 ms against 1 ms",
        (
            "test_algorithms.py::test_algorithms_on_gloo",
            "test_algorithms.py::test_the_simulator_counts_what_the_formulas_say",
            "test_algorithms.py::test_the_guide_has_the_tables_of_the_formulas",
            "test_costs.py::test_24576_ranks_take_180_ms_by_ring_and_1_ms_by_double_tree_with_the_stated_constants",
        ),
        (f"{PAGE}#25-ring-or-tree", "docs/guide/algorithms.md#24576-gpus-180-ms-against-1-ms"),
    ),
    26: Row(
        "ranks and devices",
        (
            "test_torch_facts.py::test_more_ranks_than_devices_are_refused_before_a_group_exists",
            "test_nccl.py::test_more_ranks_than_devices_are_refused",
            "test_topology.py::test_more_ranks_than_devices",
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
