"""What users write for a setting or a choice: other tools' names, other spellings, and misspellings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

# Setting -> its names in other tools.
_ALSO: Final = {
    "data.column": "text_column text_field dataset_text_field",
    "data.eos": "eos_token",
    "data.eos_id": "eos_token_id",
    "data.files": "path data_path dataset_path train_files text_files data_files",
    "data.seq_len": "sequence_length seq_length max_seq_len max_seq_length max_length block_size context_length",
    "data.validation": "val_split validation_split test_size val_ratio val_fraction",
    "data.validation_files": "val_files eval_files valid_files",
    "data.workers": "num_workers dataloader_num_workers",
    "mesh.dims": "shape mesh_shape axes sizes",
    "mesh.timeout_s": "timeout_seconds",
    "model.balance_loss": "aux_loss router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff load_balance_loss",
    "model.experts": "num_experts num_local_experts moe_num_experts n_routed_experts",
    "model.experts_per_token": "top_k topk moe_top_k num_experts_per_tok moe_router_topk",
    "model.head_dim": "head_size kv_channels",
    "model.hidden_size": "d_model dim n_embd embed_dim hidden_dim model_dim embedding_dim",
    "model.intermediate_size": "d_ff ff_dim ffn_dim mlp_dim ffn_hidden_size feed_forward_size",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "model.num_heads": "num_attention_heads attention_heads",
    "model.num_kv_heads": "num_key_value_heads num_query_groups",
    "model.num_layers": "num_hidden_layers num_blocks depth",
    "model.pretrained": "model_name_or_path name_or_path model_path",
    "model.rope_theta": "rope_base rotary_base",
    "model.tied_embeddings": "tie_word_embeddings tie_embeddings weight_tying",
    "model.vocab_size": "n_vocab padded_vocab_size vocabulary_size",
    "network.interfaces": "ifname nccl_socket_ifname gloo_socket_ifname",
    "parallel.context": "context_parallel cp_size context_parallel_size",
    "parallel.data": "data_parallel dp_size dp_replicate data_parallel_size",
    "parallel.expert": "expert_parallel expert_model_parallel_size",
    "parallel.options.schedule": "pipeline_schedule pp_schedule",
    "parallel.pipeline": "pipeline_parallel pp_size pipeline_parallel_size pipeline_model_parallel_size",
    "parallel.shard": "dp_shard fsdp_size data_parallel_shard_degree",
    "parallel.tensor": "tensor_parallel tp_size tensor_parallel_size tensor_model_parallel_size",
    "topology.links.network": "ib infiniband ethernet inter_node",
    "topology.links.node": "nvlink intra_node",
    "topology.memory_gbytes": "memory memory_gb gpu_memory_gb hbm_gb",
    "topology.ranks_per_node": "procs_per_node nproc_per_node ntasks_per_node",
    "train.activation_checkpointing": "gradient_checkpointing activation_recompute recompute_activations",
    "train.betas": "adam_betas",
    "train.checkpoint_async": "async_save async_checkpoint async_checkpointing",
    "train.checkpoint_every": "save_steps save_every save_interval checkpoint_interval checkpoint_steps ckpt_every",
    "train.clip_norm": "grad_clip clip_grad clip_grad_norm max_grad_norm max_norm grad_norm gradient_clip gradient_clipping "
    "gradient_clip_val grad_clip_norm",
    "train.compile": "torch_compile compile_model",
    "train.compute_dtype": "mixed_precision precision amp_dtype autocast_dtype",
    "train.ema": "ema_decay",
    "train.eps": "epsilon adam_eps adam_epsilon",
    "train.eval_batches": "eval_iters val_batches limit_val_batches",
    "train.eval_every": "eval_steps eval_interval val_every val_interval val_check_interval",
    "train.frozen": "freeze frozen_params",
    "train.global_batch_size": "gbs total_batch_size train_batch_size effective_batch_size",
    "train.groups": "param_groups",
    "train.groups.lr": "lr_mult lr_scale lr_factor lr_multiplier",
    "train.keep": "save_total_limit keep_last keep_last_n max_checkpoints",
    "train.label_smoothing": "label_smoothing_factor",
    "train.log_every": "logging_steps log_interval log_freq log_every_n_steps",
    "train.log_to": "report_to logger loggers",
    "train.lr": "learning_rate max_lr peak_lr base_lr initial_lr",
    "train.micro_batch_size": "mbs per_device_train_batch_size per_device_batch_size train_micro_batch_size_per_gpu",
    "train.optimizer": "optim opt",
    "train.out": "output output_dir out_dir save_dir run_dir",
    "train.patience": "early_stopping_patience",
    "train.resume": "auto_resume resume_from_checkpoint",
    "train.schedule": "scheduler lr_scheduler lr_schedule lr_scheduler_type lr_decay_style",
    "train.seed": "random_seed",
    "train.steps": "max_steps num_steps total_steps train_steps training_steps num_train_steps iterations iters max_iters "
    "train_iters num_iterations",
    "train.warmup_steps": "warmup warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "train.weight_decay": "wd",
}

# Advice on what we express in another unit or with several settings -> its names in other tools.
_ADVICE: Final = {
    "set train.steps: epochs * samples / train.global_batch_size": "epoch epochs num_epochs max_epochs num_train_epochs",
    "set train.global_batch_size (samples of all ranks), or train.micro_batch_size (of one rank's pass)": "batch_size batch bs",
    "set train.min_lr_ratio: the final learning rate, divided by train.lr": "min_lr lr_min final_lr eta_min",
    "set train.warmup_steps: a number of steps": "warmup_ratio warmup_fraction",
    "set train.betas: both in one list": "beta1 beta2 beta_1 beta_2 adam_beta1 adam_beta2",
    "set topology.ranks_per_node, or topology.devices_per_node": "gpus_per_node num_gpus_per_node",
    "set it in train.optimizer_args": "momentum nesterov amsgrad dampening maximize",
    "set train.global_batch_size and train.micro_batch_size, from which it follows": "grad_accum grad_accum_steps "
    "gradient_accumulation gradient_accumulation_steps accumulation_steps accumulate_grad_batches",
}
# Switches of other tools -> our setting, if they are on.
SWITCHES: Final = {
    "bf16": 'train.compute_dtype = "bfloat16"',
    "fp16": 'train.compute_dtype = "float16"',
    "tf32": 'train.float32_matmul_precision = "high"',
}
# Other spellings of a choice.
_VALUES: Final = {
    "always": ("true", "all", "every"),
    "bfloat16": ("bf16", "bf16_mixed"),
    "constant": ("constant_with_warmup",),
    "cosine": ("cosine_with_warmup", "cosine_annealing"),
    "float16": ("fp16", "half", "fp16_mixed"),
    "float32": ("fp32", "float", "single"),
    "float64": ("fp64", "double"),
    "interleaved_1f1b": ("interleaved",),
    "linear": ("linear_with_warmup",),
    "ring": ("ring_attention",),
    "wsd": ("warmup_stable_decay",),
}
_OTHERWISE: Final = {other: choice for choice, others in _VALUES.items() for other in others}
_DTYPE: Final = re.compile(r"(u?int|b?float)(8|16|32|64)")
# What is on or off in words that pydantic does not convert.
ON, OFF = ("full", "all", "auto", "latest", "always"), ("none", "never", "null", "disabled")
_UNITS: Final = ("s", "us", "mb", "gbytes", "steps")


def setting_of(word: str) -> str | None:
    """Return the setting that has this name in other tools.

    >>> setting_of("learningRate"), setting_of("max-steps")
    ('train.lr', 'train.steps')
    """
    parts = _parts(word)
    return next((setting for setting, words in _ALSO.items() if parts in map(_parts, words.split())), None)


def advice_on(word: str) -> str | None:
    """Return how to express what has this name in other tools, if no single setting does.

    >>> advice_on("bs")
    "set train.global_batch_size (samples of all ranks), or train.micro_batch_size (of one rank's pass)"
    """
    parts = _parts(word)
    return next((advice for advice, words in _ADVICE.items() if parts in map(_parts, words.split())), None)


def choice_of(value: object, choices: Iterable[str]) -> str | None:
    """Return the choice that `value` is a spelling of.

    >>> choice_of("torch.bfloat16", ["bfloat16", "float16"]), choice_of("float32", ["bfloat16", "float16"])
    ('bfloat16', None)
    """
    word = "_".join(_parts(str(value).removeprefix("torch.")))
    choices = list(choices)
    if (ours := _OTHERWISE.get(word)) in choices:
        return ours
    if _DTYPE.fullmatch(word):
        return word if word in choices else None
    return misspelt(word, choices, least=6)


def misspelt(word: str, known: Iterable[str], least: int = 4) -> str | None:
    """Return the only known name of which `word` is a misspelling: other case, separators or number, a missing unit, and in
    each part two letters swapped, a letter doubled, missing or added.

    least: how many letters a part must have for a letter to be missing or added. With 4, a letter may also be another one.

    >>> misspelt("stpes", ["steps", "eps"]), misspelt("epochs", ["steps", "eps"]), misspelt("timeout", ["timeout_s"])
    ('steps', None, 'timeout_s')
    """
    known, parts = list(known), _parts(word)
    same = [name for name in known if "".join(_parts(name)) == "".join(parts)]
    if not same:
        for name in known:
            *first, last = _parts(name)
            wanted = first if len(parts) == len(first) and last in _UNITS else [*first, last]
            if len(parts) == len(wanted) and all(
                _typo(part, other, least) for part, other in zip(parts, wanted, strict=True)
            ):
                same.append(name)
    return same[0] if len(same) == 1 else None


def _parts(name: str) -> list[str]:
    parts = re.split(r"[-_.\s]+", re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", name.strip()).lower())
    return ["num" if part in ("n", "nb", "number") else part for part in parts if part != "of"]


def _typo(word: str, name: str, least: int) -> bool:
    if len(word) == len(name):
        differ = [place for place, pair in enumerate(zip(word, name, strict=True)) if len(set(pair)) > 1]
        if len(differ) == 2:
            first, second = differ
            return second == first + 1 and word[first] + word[second] == name[second] + name[first]
        # Another first letter or digit makes another word.
        other = (
            len(differ) == 1 and least == 4 <= len(word) and differ != [0] and not name[differ[0]].isdigit()
        )
        return not differ or other
    shorter, longer = sorted((word, name), key=len)
    place = next((at for at, letter in enumerate(shorter) if letter != longer[at]), len(shorter))
    if longer[:place] + longer[place + 1 :] != shorter:
        return False
    doubled = place > 0 and longer[place - 1] == longer[place]
    plural = len(shorter) > 2 and longer == f"{shorter}s"
    return doubled or plural or len(shorter) >= least
