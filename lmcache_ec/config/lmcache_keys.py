# SPDX-License-Identifier: Apache-2.0
"""LMCache's own keys in `ec:`, and what happens to those that the encoder cache does not use.

LMCache overlays an `ec:` map on its whole configuration, so any of its keys may appear there. Those without a meaning
for encoder outputs change nothing in LMCache's own encoder cache either: they are accepted and noted. Those that
configure a place to store entries or a way to move them are refused unless they are off: their author expects entries
that would never get there. (As of LMCache 0.5.6; a test compares this with the installed LMCache.)
"""

from collections.abc import Mapping

_NOTED: Mapping[str, str] = {
    "about KV chunks": """
        chunk_size use_layerwise save_decode_cache save_unfull_chunk pre_caching_hash_algorithm remote_serde
        min_retrieve_tokens hit_miss_ratio priority_limit enable_kv_events use_gpu_connector_v3
        enable_blending blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens blend_special_str
        enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode
        enable_chunk_statistics chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours
        chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy""",
    "about LMCache's memory pool; LocalCPU is always on and grows as it fills": """
        local_cpu local_cpu_use_hugepages reserve_local_cpu_size numa_mode pin_timeout_sec pin_check_interval_sec
        enable_lazy_memory_allocator lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio
        lazy_memory_safe_size""",
    "about LMCache's disk layout; one folder serves all engines here": "local_disk_path_sharding",
    "about LMCache's own servers, workers and process": """
        mp_host mp_port enable_controller controller_pull_url controller_reply_url controller_url
        lmcache_instance_id lmcache_worker_ports lmcache_worker_port lmcache_worker_ids
        lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time lookup_timeout_ms lookup_server_worker_ids
        enable_scheduler_bypass_lookup external_lookup_client enable_async_loading py_enable_gc
        internal_api_server_enabled internal_api_server_host internal_api_server_port_start
        internal_api_server_include_index_list internal_api_server_socket_path_prefix
        runtime_plugin_locations plugin_locations script_allowed_imports run_script_api_enabled
        remote_config_url app_id""",
    "about backends that are not in use here": """
        audit_actual_remote_url
        p2p_host p2p_init_ports p2p_lookup_ports transfer_channel gds_path_sharding gds_buffer_size use_gds gds_backend
        maru_pool_size nixl_buffer_size nixl_buffer_device nixl_peer_port nixl_peer_host nixl_peer_init_port
        nixl_peer_alloc_port nixl_proxy_host nixl_proxy_port nixl_role
        pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_peer_query_port
        pd_proxy_host pd_proxy_port pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec
        pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional""",
}

_REFUSED: Mapping[str, str] = {
    "LMCache's transfer between engines does not carry encoder outputs: remove it; "
    "vLLM's ec_role makes an engine a producer or a consumer": "enable_p2p enable_pd enable_xpyd",
    "this LMCache backend is not used for encoder outputs: remove it; local_disk and remotes name what is": """
        gds_path maru_path nixl_backends storage_plugins external_backends remote_storage_plugins""",
    "tiers are not chosen by their names: remove it; "
    "a tier is left out by local_disk: null, or remotes: []": "store_location retrieve_locations",
}

NOTED: Mapping[str, str] = {key: why for why, keys in _NOTED.items() for key in keys.split()}
"""Key -> why it has no effect here."""

REFUSED: Mapping[str, str] = {key: why for why, keys in _REFUSED.items() for key in keys.split()}
"""Key -> what to do instead."""

_OFF = ("", "0", "0.0", "false", "no", "off", "none", "null")


def is_off(value: object) -> bool:
    """Whether this means "not used", in any spelling of YAML, JSON and the environment."""
    return not value or (isinstance(value, str) and value.strip().lower() in _OFF)
