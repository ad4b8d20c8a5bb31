"""THE table: what torch.distributed has, which tests show it here, and which lines of the documentation say it.

test_coverage_rows.py checks that every test and every heading is there.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

PAGE: Final = "docs/reference/from_torch.md"


class Row(NamedTuple):
    """One row of the page. tests: file::function in tests/. lines: file#heading from the repository's root."""

    tests: tuple[str, ...]
    lines: tuple[str, ...]


# The number of a row of PAGE and what says it; below it files of tests/, each with its tests.
_TABLE: Final = """
1: PAGE#joining-backends-devices docs/reference/support.md#backends docs/guide/launching.md#is-this-host-fit
    mesh/test_meeting.py test_a_registered_backend_and_one_named_by_device
    comm/test_refused.py test_every_rank_refuses_cold_or_prepared_and_the_group_goes_on
    doctor/test_doctor.py test_a_device_or_backend_that_is_not_there
    documents/test_documents.py test_a_page_that_is_made_is_what_is_made_now
    comm/test_refused.py test_the_table_of_backends_knows_every_operation_and_torch_s_devices
2: PAGE#joining-backends-devices docs/reference/config.md#network docs/guide/launching.md#several-hosts
    mesh/test_meeting.py test_network_settings_are_set_before_and_put_back_after
        test_an_interface_that_is_set_twice_is_refused
    mesh/test_meeting.py test_interfaces_and_sockets_become_variables
    doctor/test_doctor.py test_an_interface_set_twice_or_down_or_missing_in_the_environment
3: PAGE#joining-backends-devices docs/reference/config.md#process
    mesh/test_meeting.py test_each_way_to_meet test_torchs_spawn
    config/test_config.py test_options_of_a_group
    config/test_config_errors.py test_the_report_on_a_bad_config
    gpu/test_nccl.py test_world_size_one_on_one_gpu
4: PAGE#messages-objects-store docs/guide/communication.md#which-store-and-what-each-can-do
    mesh/test_store.py test_any_store_carries_a_mesh test_a_hash_store_carries_a_mesh_of_one_process
        test_one_key test_counters test_append_adds_or_is_refused test_compare_set test_several_keys
        test_a_key_that_never_comes_is_named_with_the_rank_and_the_seconds
5: PAGE#joining-backends-devices docs/guide/launching.md#is-this-host-fit
    doctor/test_doctor.py test_json_has_all_keys_and_is_right_about_this_host
        test_every_rank_says_where_it_is
    mesh/test_mesh.py test_the_plan_is_what_real_processes_create
6: PAGE#groups-and-devicemesh
    mesh/test_mesh.py test_device_meshes_are_over_our_groups test_a_mesh_from_an_existing_device_mesh
    parallel/test_torch_parallel.py test_fsdp_and_tensor_parallel_equal_one_process
7: PAGE#groups-and-devicemesh docs/guide/groups.md
    mesh/test_mesh.py test_the_plan_is_what_real_processes_create
        test_group_rank_is_coord_under_every_rank_order test_create_declares_a_merged_dim_on_a_live_mesh
        test_meshes_on_parts_of_the_world_side_by_side
    simulator/test_simulator_verdicts.py
        test_a_planted_bug_gets_its_verdict_and_the_corrected_program_passes
    mesh/test_verdicts.py test_who_has_not_come_and_what_it_does_instead
    simulator/test_simulator_starts.py test_asynchronous_calls_of_two_nccl_groups_in_crossed_order
8: PAGE#joining-backends-devices docs/guide/groups.md#opening-and-closing
    mesh/test_mesh.py test_closing_and_opening_again_in_one_process
    mesh/test_teardown.py test_twenty_cycles_return_files_and_threads
        test_after_an_exception_the_next_mesh_works
9: PAGE#messages-objects-store docs/guide/communication.md#messages
    comm/test_collectives.py test_against_numpy test_empty_messages_from_whoever_comes_first
    mesh/test_mesh.py test_dst_and_src_are_global_ranks_in_torch_and_coords_here
10: PAGE#messages-objects-store docs/guide/communication.md#the-size-cap
    comm/test_objects.py test_every_call_along_every_dim_under_a_permuted_rank_order
        test_what_cannot_be_sent_or_is_not_agreed_on_raises_on_every_rank
        test_a_pickle_is_never_read_by_a_rank_that_did_not_ask_for_it
11: PAGE#messages-objects-store docs/guide/communication.md#several-at-once
    comm/test_collectives.py test_against_numpy
    comm/test_mismatch.py test_both_ends_of_a_mismatched_message_are_told_at_once
12: PAGE#messages-objects-store docs/guide/communication.md#rings-and-lines
    comm/test_collectives.py test_against_numpy
    documents/test_examples.py test_it_prints_what_it_says
13: PAGE#collectives docs/guide/communication.md#asynchronous-calls
    comm/test_collectives.py test_against_numpy test_handles_say_what_became_of_the_call
    mesh/test_verdicts.py test_who_has_not_come_and_what_it_does_instead
14: PAGE#collectives docs/guide/communication.md#collectives
    comm/test_collectives.py test_against_numpy
    simulator/test_simulator.py test_random_programs_under_every_schedule_are_those_of_gloo
15: PAGE#messages-objects-store docs/guide/communication.md#objects
    comm/test_objects.py test_every_call_along_every_dim_under_a_permuted_rank_order
        test_what_cannot_be_sent_or_is_not_agreed_on_raises_on_every_rank
16: PAGE#collectives docs/guide/hangs.md
    mesh/test_store.py test_who_did_not_come
17: PAGE#collectives docs/reference/support.md#what-each-backend-reduces
    comm/test_collectives.py test_against_numpy
    documents/test_documents.py test_a_page_that_is_made_is_what_is_made_now
18: PAGE#debugging-errors-gradients docs/guide/stats.md#a-timeline-of-all-ranks
    comm/test_collectives.py test_the_profiler_sees_op_dims_and_plan
    mesh/test_trace.py test_the_file_is_what_chrome_reads test_the_events_are_the_calls_that_were_made
19: PAGE#joining-backends-devices docs/guide/launching.md docs/guide/launching.md#several-hosts
    jobs/test_jobs.py test_run_gives_a_script_its_mesh_and_its_arguments
    launch/test_orphans.py test_a_torchrun_of_ones_own_restarts_and_tells_each_error_once
    mesh/test_launcher.py test_each_launcher
    mesh/test_meeting.py test_each_way_to_meet test_torchs_spawn
    two_hosts/test_two_hosts.py test_the_same_line_on_both_hosts
20: PAGE#debugging-errors-gradients docs/guide/hangs.md docs/guide/stats.md#log-lines-by-rank
    mesh/test_breakpoint.py test_one_rank_stops_and_the_others_wait
    mesh/test_meeting.py test_torchs_own_checks_may_be_on
    comm/test_mismatch.py test_a_difference_is_named_on_every_rank_of_the_group
    mesh/test_verdicts.py test_who_has_not_come_and_what_it_does_instead
    mesh/test_logs.py test_log_lines_of_every_rank test_every_line_has_the_prefix
21: PAGE#debugging-errors-gradients docs/coming_from/ddp.md#unused-parameters
    parallel/test_parallel.py test_what_goes_wrong_within_a_step_is_named
        test_gradients_are_the_sum_over_the_whole_batch
22: PAGE#debugging-errors-gradients docs/reference/faults.md
    mesh/test_meeting.py test_what_torch_raised_is_the_cause
    mesh/test_verdicts.py test_who_has_not_come_and_what_it_does_instead
23: PAGE#debugging-errors-gradients
    documents/test_examples.py test_it_prints_what_it_says test_what_scatter_allocates
24: PAGE#groups-and-devicemesh PAGE#two-errors-of-the-literature
    documents/test_examples.py test_it_prints_what_it_says
    mesh/test_mesh.py test_dst_and_src_are_global_ranks_in_torch_and_coords_here
    mesh/test_mesh.py test_meshes_on_parts_of_the_world_side_by_side
25: PAGE#collectives docs/guide/costs.md#24576-gpus-180-ms-against-1-ms
    algorithms/test_algorithms.py test_algorithms_on_gloo test_the_simulator_counts_what_the_formulas_say
        test_the_guide_has_the_tables_of_the_formulas
    predict/test_times.py
        test_24576_ranks_take_180_ms_by_ring_and_1_ms_by_double_tree_with_the_stated_constants
26: PAGE#joining-backends-devices docs/guide/launching.md#local-rank-and-device
    mesh/test_devices.py test_more_ranks_than_devices_are_refused_before_a_group_exists
    gpu/test_nccl.py test_more_ranks_than_devices_are_refused
    predict/test_links.py test_each_finding_has_its_numbers_and_what_to_try
"""


def _row(text: str) -> Row:
    pages, *words = text.replace("PAGE", PAGE).split("\n", 1)
    tests, file = [], ""
    for word in " ".join(words).split():
        if word.endswith(".py"):
            file = word
        else:
            tests.append(f"{file}::{word}")
    return Row(tuple(tests), tuple(pages.split()))


_PARTS: Final = re.split(r"^(\d+): ", _TABLE, flags=re.MULTILINE)[1:]
ROWS: Final = {int(n): _row(text) for n, text in zip(_PARTS[::2], _PARTS[1::2], strict=True)}
