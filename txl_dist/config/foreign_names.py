"""Names of settings in other code bases, each with its counterpart here.

The names are from the original transformer-xl, NVIDIA's code, nanoGPT, transformers, Megatron, DeepSpeed, Lightning and
torchrun. Names for commands other than training are also from vLLM and lm-evaluation-harness. A row of the table
applies only to commands that have the counterpart. So `batch_size` can have different meanings in training and in
evaluation. Case, hyphens and underscores do not matter when names are compared. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from txl_dist.console.suggest import did_you_mean, nearest

SURE = 0.85
"""Similarity (0 to 1) at which a misspelt name counts as a name in the table, or as a name of this package."""


class Counterpart(NamedTuple):
    """Row of the table: names in other programs, and the setting or flag that means the same here."""

    foreign: str
    """Names that other programs use, as one text with a blank between two names."""
    here: str = ""
    """Setting (`section.key`) or flag of this package, with underscores. It is empty if this package has no
    counterpart, and then the note says why."""
    value: str = ""
    """Value that the foreign name implies, or empty. For example, bf16 implies engine.precision=bf16."""
    note: str = ""
    """Remark for the message, in whole sentences: how to convert the value, or what differs."""
    needs: str = ""
    """Flag that limits a row without `here`: the row applies only to commands that have this flag. It is empty if the
    row applies to all commands."""

    def hint(self, *, spell: Callable[[str, str], str]) -> str:
        """Return the last part of a message about the foreign name, which suggests the counterpart. The text begins
        with a blank.

        `spell(name, value)` writes a setting or flag as the user should write it. `value` can be empty.
        """
        if self.here:
            question = f" Did you mean {spell(self.here, self.value)}?"
        else:
            question = ""
        return question + (f" {self.note}" if self.note else "")


_MEMORY = "A token also sees train.memory_len tokens before its segment."
_GLOBAL = "The setting is the global batch: batch size per GPU * GPUs * accumulation steps."
_MICRO = (
    "The setting is the number of lanes that a GPU runs at once. Accumulation steps are num_lanes / (ranks * "
    "microbatch_lanes)."
)
_EPOCHS = (
    "The value is epochs * tokens of the corpus / (train.num_lanes * train.segment_len). --dry-run prints the epochs."
)
_TOKENS = "The value is tokens / (train.num_lanes * train.segment_len)."
_HEADS = "Set model.head_width too. Other programs use width / heads."
_VOCABULARY = "The corpus determines the vocabulary size. Set it with `txl prepare --vocab-size N`."
_DEVICE = (
    "A GPU is used if there is one. CUDA_VISIBLE_DEVICES selects among several GPUs, and its empty value selects the "
    "CPU."
)
_RANKS = "Start several ranks with `txl launch --num_accelerators N CONFIG.toml`."
_DEEPSPEED = "DeepSpeed files are not read. Set engine.zero_stage, engine.precision and engine.offload_optimizer."
_PARALLEL = "Models are sharded only by ZeRO. Set engine.zero_stage to 1, 2 or 3."
_SCALE = "With fp16 the loss scale is automatic. With engine.precision bf16 no loss scale is needed."
_ON_COMMAND_LINE = "A file cannot set it. Give --resume CHECKPOINT on the command line."
_SHARE = "The value is share * train.max_steps."

COUNTERPARTS = (
    # Commands other than training.
    Counterpart(
        "max_new_tokens max_length max_len length num_tokens n_tokens max_gen_toks n_predict num_predict "
        "max_completion_tokens gen_len",
        "max_tokens",
    ),
    Counterpart("num_return_sequences n best_of num_sequences samples", "num_samples"),
    Counterpart("temp t", "temperature"),
    Counterpart(
        "do_sample sample greedy",
        "temperature",
        note="With 0 the likeliest token is taken. Above 0, tokens are sampled.",
    ),
    Counterpart("stop_sequences stop_strings stop_words until", "stop"),
    Counterpart("text input start starting_text context p", "prompt"),
    Counterpart("prompt_file input_file prompt_path", "file"),
    Counterpart(
        "penalty frequency_penalty presence_penalty rep_penalty",
        "repetition_penalty",
        note="The value multiplies the log-probability of tokens that occurred. 1 changes nothing.",
    ),
    Counterpart(
        "num_beams beam beam_size beams",
        note="Beam search is not supported. Texts are sampled, or generated greedily with --temperature 0.",
    ),
    Counterpart("logprobs top_logprobs", "log_probs"),
    Counterpart(
        "output output_dir output_file output_path out_dir out_file save save_dir save_path o outfile outdir "
        "output_prefix",
        "out",
    ),
    Counterpart("results result_file output output_path output_file out", "json"),
    Counterpart(
        "mem_len mem_length memory_length max_model_len max_seq_len ctx ctx_size context_length n_ctx",
        "memory_len",
    ),
    Counterpart("tgt_len seq_len seq_length block_size max_length", "segment_len"),
    Counterpart("ext_len stride", "overlap_len"),
    Counterpart("bsz bs batch_size eval_batch_size per_device_eval_batch_size", "num_lanes"),
    Counterpart("bsz bs", "batch_size"),
    Counterpart("dataset data_path data_dir corpus eval_data data_root", "data"),
    Counterpart("subset set dataset_split", "split"),
    Counterpart(
        "tasks task num_fewshot limit",
        note="Tasks are run by lm-evaluation-harness (docs/inference.md).",
    ),
    Counterpart(
        "max_tokens num_tokens n_tokens tokens eval_tokens max_eval_tokens max_samples num_samples eval_iters "
        "max_eval_steps max_batches num_batches limit_val_batches max_documents",
        note="The whole split is scored. To score less, prepare a shorter text and give its corpus with --data. "
        "During training, eval.max_tokens limits the evaluations.",
        needs="baselines",
    ),
    Counterpart(
        "prompt temperature top_k top_p stop max_new_tokens",
        note="`txl evaluate` scores a text. To generate text: txl generate MODEL --prompt TEXT --max-tokens N.",
        needs="baselines",
    ),
    Counterpart(
        "model model_path checkpoint ckpt ckpt_path model_name_or_path model_dir load bundle run",
        note="Give the model first and without a flag: a run, a checkpoint or a bundle.",
    ),
    Counterpart(
        "output output_dir out out_dir save_dir o outfile output_path save",
        note="Give the folder to write second and without a flag.",
        needs="dtype",
    ),
    Counterpart("served_model_name model_name model_alias", "name"),
    Counterpart("max_batch_size max_concurrency parallel num_slots max_batch", "max_num_seqs"),
    Counterpart("queue_size max_queue_size max_waiting", "max_queue"),
    Counterpart("bind address ip listen hostname", "host"),
    Counterpart("p server_port http_port listen_port", "port"),
    Counterpart("token auth_token key api_token", "api_key"),
    Counterpart("request_timeout timeout_s", "timeout"),
    Counterpart("graceful_timeout timeout_graceful_shutdown", "shutdown_timeout"),
    Counterpart("cuda use_cuda gpu", "device", "cuda"),
    Counterpart("fp16 half float16 use_fp16", "dtype", "fp16"),
    Counterpart("bf16 bfloat16", "dtype", "bf16"),
    Counterpart("precision torch_dtype quantization quantize outtype weight_type", "dtype"),
    Counterpart("int8 load_in_8bit q8_0", "dtype", "int8"),
    Counterpart("to type target output_format export_format from source_format model_type framework", "format"),
    Counterpart("tokenizer_type tokenizer_kind model_type tokenizer_name model", "tokenizer"),
    Counterpart(
        "tokenizer_model tokenizer_path tokenizer_json vocab_file tokenizer_name_or_path merge_file "
        "sentencepiece_model",
        "tokenizer_file",
    ),
    Counterpart("vocab_file vocab_path vocabulary tokenizer tokenizer_file", "vocab"),
    Counterpart("vocab n_vocab vocabulary_size num_merges", "vocab_size"),
    Counterpart(
        "val_ratio val_fraction valid_ratio val_split validation_split val_size test_size holdout valid_split "
        "validation_fraction",
        "valid_fraction",
        note="It is a share of the documents: 0.05.",
    ),
    Counterpart("test_ratio", "test_fraction", note="It is a share of the documents: 0.05."),
    Counterpart("valid_file val_file validation_file dev_file val dev validation", "valid"),
    Counterpart("test_file", "test"),
    Counterpart(
        "train train_file train_files input inputs input_file input_dir data corpus files",
        note="Give the inputs first and without a flag: txl prepare FILES --out DIR.",
        needs="valid_fraction",
    ),
    Counterpart("json_keys json_key text_column text_field text_key column jsonl_key field key", "jsonl_field"),
    Counterpart("workers num_proc n_proc nproc processes jobs threads j num_processes", "num_workers"),
    Counterpart("shard_size tokens_per_shard chunk_size", "shard_len", note="The value is in tokens."),
    Counterpart("append_eod append_eos add_eos eod", "end_of_text"),
    Counterpart("lowercase uncased do_lower_case lower", "lower_case"),
    Counterpart("dedup deduplicate remove_duplicates", "duplicates", "drop"),
    Counterpart("force f overwrite_output_dir overwrite_output", "overwrite"),
    Counterpart("encoding errors", "encoding_errors", note="Text is read as UTF-8."),
    Counterpart("num_gpus n_gpus world_size num_devices devices", "gpus"),
    Counterpart("gpu_type gpu_name device hardware accelerator", "gpu"),
    Counterpart("params param search space axis", "grid", note="For instance --grid optim.lr=1e-3,2e-3."),
    Counterpart("num_seeds n_seeds repeats", "seeds"),
    Counterpart("num_jobs n_jobs workers parallel j num_workers", "jobs"),
    Counterpart(
        "verbose v debug quiet q",
        note="There is no such switch. Commands write their messages to standard error.",
    ),
    Counterpart("version V", note="`txl --version` prints the version."),
    Counterpart(
        "config config_file c cfg",
        note="Give the configuration file first and without a flag: txl train CONFIG.toml.",
        needs="run.dir",
    ),
    # Training: length and batch.
    Counterpart("learning_rate lrate learn_rate max_lr peak_lr base_lr initial_lr init_lr warmup_max_lr", "optim.lr"),
    Counterpart("min_learning_rate lr_min eta_min warmup_min_lr end_lr final_lr", "optim.min_lr"),
    Counterpart(
        "batch_size bsz bs global_batch_size train_batch_size train_bs per_device_train_batch_size "
        "per_gpu_train_batch_size per_device_batch_size local_batch_size device_batch_size num_sequences "
        "total_batch_size",
        "train.num_lanes",
        note=_GLOBAL,
    ),
    Counterpart(
        "micro_batch_size microbatch_size micro_batch mbs train_micro_batch_size_per_gpu gpu0_bsz",
        "train.microbatch_lanes",
    ),
    Counterpart(
        "gradient_accumulation_steps grad_accum_steps accumulate_grad_batches grad_accumulation "
        "accumulation_steps update_freq batch_chunk gradient_accumulation num_microbatches",
        "train.microbatch_lanes",
        note=_MICRO,
    ),
    Counterpart(
        "epochs epoch num_epochs max_epochs n_epochs num_train_epochs total_epochs",
        "train.max_steps",
        note=_EPOCHS,
    ),
    Counterpart(
        "max_step max_iters max_iter max_iterations iterations iters num_iters num_iterations train_iters "
        "num_steps n_steps steps training_steps train_steps max_train_steps total_steps num_training_steps "
        "total_num_steps lr_decay_iters lr_decay_steps decay_steps max_updates",
        "train.max_steps",
    ),
    Counterpart(
        "max_tokens total_tokens train_tokens num_tokens token_budget tokens target_tokens lr_decay_tokens",
        "train.max_steps",
        note=_TOKENS,
    ),
    Counterpart("train_samples", "train.max_steps", note="The value is samples / train.num_lanes."),
    Counterpart("tgt_len train_tgt_len", "train.segment_len"),
    Counterpart(
        "seq_len seq_length seqlen sequence_length sequence_len max_seq_len max_seq_length max_sequence_length "
        "block_size context_length context_len context_size context ctx ctx_len n_ctx n_positions "
        "max_position_embeddings max_length max_len bptt model_max_length num_ctx",
        "train.segment_len",
        note=_MEMORY,
    ),
    Counterpart("mem_len mem_length memory_length memory_size n_mem mem", "train.memory_len"),
    Counterpart("eval_tgt_len eval.tgt_len eval.seq_len eval.block_size eval_seq_len", "eval.segment_len"),
    Counterpart("eval_mem_len eval.mem_len", "eval.memory_len"),
    Counterpart("ext_len", "eval.overlap_len"),
    # The network.
    Counterpart(
        "n_layer n_layers num_hidden_layers num_layer layers depth nlayers num_blocks n_blocks decoder_layers",
        "model.num_layers",
    ),
    Counterpart(
        "n_head n_heads num_attention_heads nheads num_head heads attention_heads decoder_attention_heads",
        "model.num_heads",
        note=_HEADS,
    ),
    Counterpart(
        "hidden_size d_model n_embd n_embed model_dim dim hidden_dim embedding_dim hidden_width d_hidden "
        "model_width nhid",
        "model.width",
    ),
    Counterpart("d_embed emb_size embed_dim embedding_size d_emb", "model.embed_width"),
    Counterpart("d_head head_dim head_size kv_channels d_kv dim_head", "model.head_width"),
    Counterpart(
        "d_inner d_ff ff_dim ffn_dim ffn_hidden_size n_inner intermediate_size feedforward_dim mlp_dim inner_dim "
        "ffn_size hidden_ff",
        "model.ff_width",
    ),
    Counterpart("vocab_size vocabulary_size n_vocab n_token ntokens padded_vocab", note=_VOCABULARY, needs="run.dir"),
    Counterpart(
        "dropatt attn_dropout attn_pdrop attention_probs_dropout_prob attention_dropout_prob att_dropout",
        "model.attention_dropout",
    ),
    Counterpart("dropout_rate dropout_prob hidden_dropout hidden_dropout_prob p_dropout drop_rate", "model.dropout"),
    Counterpart("embd_pdrop embedding_dropout emb_dropout embd_dropout", "model.embed_dropout"),
    Counterpart(
        "resid_pdrop residual_dropout resid_dropout",
        "model.projection_dropout",
        note="For the feed-forward layer, set model.ff_dropout.",
    ),
    Counterpart("ffn_dropout relu_dropout activation_dropout mlp_dropout", "model.ff_dropout"),
    Counterpart("div_val", "model.div_value"),
    Counterpart(
        "adaptive adaptive_softmax adaptive_input adaptive_softmax_cutoff",
        "model.cutoffs",
        note=("A list of token ids enables adaptive softmax. `txl inspect CORPUS --num-clusters 4` computes good ids."),
    ),
    Counterpart("tie_projs", "model.tie_projections"),
    Counterpart("tied tie_embeddings tie_word_embeddings tie_weight share_embeddings", "model.tie_weights"),
    Counterpart("not_tied untie_embeddings_and_output_weights untie_weights", "model.tie_weights", "False"),
    Counterpart(
        "untie_r", "model.share_biases", note="The values are opposite: untie_r=True means share_biases=False."
    ),
    Counterpart("pre_lnorm prenorm pre_ln norm_first normalize_before encoder_normalize_before", "model.pre_norm"),
    Counterpart(
        "attn_type position_embedding_type positional_encoding pos_emb",
        "model.positions",
        note="attn_type 0 is relative, 1 learned_relative, 2 absolute.",
    ),
    Counterpart("activation_function hidden_act act_fn activation_fn nonlinearity", "model.activation"),
    Counterpart("swiglu", "model.activation", "swiglu"),
    Counterpart("squared_relu", "model.activation", "relu2"),
    Counterpart("normalization norm_type layer_norm_type", "model.norm"),
    Counterpart("rmsnorm use_rmsnorm rms_norm", "model.norm", "rms"),
    Counterpart("layer_norm_eps layer_norm_epsilon layernorm_epsilon rms_norm_eps norm_epsilon", "model.norm_eps"),
    Counterpart("qk_norm qk_layernorm", "model.query_key_norm"),
    Counterpart("initializer_range init_method_std init_range weight_init_std", "model.init_std"),
    Counterpart("proj_init_std", "model.projection_init_std"),
    Counterpart(
        "rope rotary use_rotary_position_embeddings rope_theta alibi",
        note="Rotary positions are not supported. model.positions can be relative, learned_relative or absolute.",
    ),
    # Optimizer and schedule.
    Counterpart("optimizer optimizer_name optimizer_type optimizer.type optim opt optimizer.name", "optim.name"),
    Counterpart("optimizer.params.lr", "optim.lr"),
    Counterpart("beta1 adam_beta1 beta2 adam_beta2 adam_betas", "optim.betas", note="Give both values: 0.9 0.999."),
    Counterpart("epsilon adam_epsilon adam_eps", "optim.eps"),
    Counterpart("wd weight_decay_rate decay_rate l2 adam_weight_decay", "optim.weight_decay"),
    Counterpart("mom sgd_momentum", "optim.momentum"),
    Counterpart(
        "clip grad_clip clip_grad gradient_clipping gradient_clip_val max_grad_norm clip_grad_norm max_norm "
        "gradient_clip",
        "optim.clip_norm",
    ),
    Counterpart(
        "warmup warmup_iters warmup_step warmup_num_steps num_warmup_steps lr_warmup_steps lr_warmup_iters "
        "warmup_updates n_warmup_steps",
        "optim.warmup_steps",
    ),
    Counterpart(
        "warmup_ratio warmup_fraction lr_warmup_fraction warmup_proportion warmup_pct pct_start",
        "optim.warmup_steps",
        note=_SHARE,
    ),
    Counterpart(
        "warmup_epochs",
        "optim.warmup_steps",
        note=(
            "The value is warm-up epochs * tokens of the corpus / (train.num_lanes * train.segment_len). --dry-run "
            "prints the epochs."
        ),
    ),
    Counterpart("warmup_tokens", "optim.warmup_steps", note=_TOKENS),
    Counterpart(
        "scheduler lr_scheduler lr_scheduler_type lr_schedule lr_decay_style decay_lr scheduler_type scheduler.type",
        "optim.schedule",
    ),
    Counterpart("ema_decay ema_rate", "optim.ema_decay"),
    # Engine.
    Counterpart("bf16 bfloat16 use_bf16 bf16.enabled", "engine.precision", "bf16"),
    Counterpart("fp16 half float16 use_fp16 fp16.enabled amp use_amp", "engine.precision", "fp16"),
    Counterpart("tf32 allow_tf32", "engine.precision", "tf32"),
    Counterpart("fp32 float32", "engine.precision", "fp32"),
    Counterpart("mixed_precision dtype param_dtype torch_dtype params_dtype", "engine.precision"),
    Counterpart(
        "static_loss_scale dynamic_loss_scale loss_scale initial_scale_power loss_scale_window initial_loss_scale",
        note=_SCALE,
    ),
    Counterpart(
        "zero zero_optimization zero_optimization.stage deepspeed_stage fsdp sharding sharding_strategy",
        "engine.zero_stage",
    ),
    Counterpart("offload_param cpu_offload_params", "engine.offload_parameters"),
    Counterpart("cpu_offload offload", "engine.offload_optimizer"),
    Counterpart("deepspeed deepspeed_config ds_config deepspeed_config_file", note=_DEEPSPEED),
    Counterpart(
        "gradient_checkpointing activation_checkpoint recompute recompute_activations checkpoint_activations "
        "recompute_granularity",
        "engine.activation_checkpointing",
    ),
    Counterpart(
        "compile torch_compile use_compile",
        "engine.cuda_graph",
        note="Models are not compiled. CUDA graphs reduce the host's work, and engine.attention selects the kernels.",
    ),
    Counterpart(
        "flash flash_attn flash_attention use_flash_attn use_flash_attention attn_implementation",
        "engine.attention",
    ),
    Counterpart(
        "tensor_parallel tensor_parallel_size tensor_model_parallel_size tp pipeline_parallel_size pp "
        "pipeline_model_parallel_size model_parallel_size context_parallel_size",
        "engine.zero_stage",
        note=_PARALLEL,
    ),
    Counterpart("omp_num_threads cpu_threads threads", "engine.num_threads"),
    Counterpart(
        "distributed_timeout distributed_timeout_minutes ddp_timeout nccl_timeout",
        "engine.timeout_s",
        note="The value is in seconds.",
    ),
    # Evaluation, checkpoints, reports.
    Counterpart(
        "eval_interval eval_steps eval_every val_interval val_check_interval evaluation_interval eval_freq "
        "eval.interval eval.every validation_interval eval_every_n_steps check_val_every_n_epoch val_loss_every",
        "eval.every_steps",
    ),
    Counterpart(
        "eval_iters max_eval_steps limit_val_batches eval_batches max_eval_samples",
        "eval.max_tokens",
        note="The value is batches * eval.num_lanes * segment length.",
    ),
    Counterpart(
        "per_device_eval_batch_size eval_batch_size per_gpu_eval_batch_size val_batch_size eval.batch_size",
        "eval.num_lanes",
    ),
    Counterpart(
        "save_steps save_interval save_every checkpoint_interval ckpt_interval save_freq checkpoint_every "
        "save_interval_updates every_n_train_steps ckpt_every checkpoint.interval checkpoint.every",
        "checkpoint.every_steps",
    ),
    Counterpart(
        "save_total_limit keep_last_n max_checkpoints save_top_k keep_checkpoint_max",
        "checkpoint.keep_last",
    ),
    Counterpart("load_best_model_at_end save_best keep_best_only", "checkpoint.keep_best"),
    Counterpart("async_save async_checkpoint", "checkpoint.asynchronous"),
    Counterpart(
        "log_interval logging_steps log_every log_freq log_every_n_steps print_freq steps_per_print log_steps "
        "print_every log.interval metrics.interval metrics.log_interval",
        "metrics.log_every_steps",
    ),
    Counterpart(
        "wandb_project wandb_log use_wandb report_to", "metrics.wandb", note="The value is the project's name."
    ),
    Counterpart("tensorboard_dir use_tensorboard tensorboard_log_dir", "metrics.tensorboard"),
    Counterpart(
        "output_dir out_dir work_dir save_dir save log_dir logdir checkpoint_dir ckpt_dir default_root_dir "
        "exp_dir experiment_dir run_dir results_dir save_path logging_dir",
        "run.dir",
    ),
    Counterpart("random_seed seed_everything manual_seed rng_seed data_seed", "run.seed"),
    Counterpart(
        "resume_from_checkpoint resume_from resume_path load load_dir load_checkpoint ckpt_path restart "
        "restart_dir restore_from auto_resume checkpoint_path resume_checkpoint checkpoint ckpt",
        "resume",
        note="Without --resume, the same command resumes from the newest checkpoint in run.dir.",
    ),
    Counterpart(
        "resume_from_checkpoint resume resume_from load load_dir restart restart_dir ckpt_path",
        note=_ON_COMMAND_LINE,
    ),
    Counterpart(
        "init_from pretrained pretrained_model pretrained_path finetune_from model_name_or_path load_pretrained "
        "pretrained_model_name_or_path warm_start model_path model",
        "run.init",
        note="The value is a bundle, which `txl import` or `txl export` writes.",
    ),
    Counterpart(
        "dataset dataset_name dataset_path dataset_dir data_dir data_path data_root data_file train_file "
        "train_data train_path corpus corpus_path input_file train_data_path data",
        "data.path",
        note="The value is a corpus that `txl prepare` made from the text.",
    ),
    Counterpart(
        "validation_file valid_data_path val_data",
        "data.eval_split",
        note="The value is a split of the corpus, which `txl prepare --valid FILE` makes.",
    ),
    Counterpart("max_time time_limit max_run_time exit_duration_in_mins max_wallclock", "max_time"),
    Counterpart("fast_dev_run dryrun dry", "dry_run"),
    Counterpart("device cuda use_cuda gpu accelerator no_cuda use_cpu", note=_DEVICE),
    Counterpart(
        "gpus num_gpus n_gpu devices num_devices nproc_per_node nproc num_processes world_size num_nodes nnodes "
        "multi_gpu ddp distributed local_rank strategy num_accelerators",
        note=_RANKS,
    ),
    Counterpart(
        "num_workers dataloader_num_workers data_workers pin_memory",
        "data.prefetch_depth",
        note="One thread reads the corpus, this number of steps ahead of training.",
    ),
)


FOREIGN_COMMANDS = {
    "run start fit pretrain learn continue resume": ("train CONFIG.toml", "`txl train` also resumes a run."),
    "finetune fine_tune fine-tune ft": ("train CONFIG.toml --init BUNDLE", ""),
    "eval test validate score perplexity ppl bench benchmark": ("evaluate RUN", ""),
    "sample chat complete infer inference predict ask talk write prompt decode": ("generate RUN --prompt TEXT", ""),
    "tokenize tokenise preprocess process dataset data build encode download pack shard": (
        "prepare TEXT --out CORPUS",
        "`txl prepare` also trains the tokenizer.",
    ),
    "convert": (
        "import FILE BUNDLE --format NAME",
        "`txl import` reads weights of other programs, `txl export` writes them, and `txl prepare` converts text.",
    ),
    "load from_pretrained": ("import FILE BUNDLE --format NAME", ""),
    "save merge upload push push_to_hub publish to_onnx quantize": ("export RUN BUNDLE", ""),
    "deploy server api host up": ("serve RUN", ""),
    "info show stats list ls describe summary view dump cat": ("inspect PATH", ""),
    "check validate_data fsck hash": ("verify PATH", ""),
    "env environment diagnose collect_env collect-env debug selftest": ("doctor", ""),
    "tune search hpo grid sweeps optimize ablate": ("sweep CONFIG.toml --grid SETTING=VALUES", ""),
    "estimate memory flops size profile predict_memory dry_run dry-run": (
        "plan CONFIG.toml --gpus N --gpu KIND",
        "`txl train CONFIG.toml --dry-run` prints the memory that a run needs on this machine.",
    ),
    "distributed torchrun deepspeed accelerate slurm spawn submit": ("launch CONFIG.toml", ""),
    "plot dashboard tensorboard graph curves logs": ("report RUN", ""),
    "diff": ("compare RUN RUN", ""),
    "completions autocomplete shell_completion install_completion install-completion": ("completion bash", ""),
}
"""Commands of other programs, as one text with a blank between two commands. Each entry has our command, the words that
follow it, and a remark."""
SECTIONS = {
    "optimizer": "optim",
    "scheduler": "optim",
    "lr_scheduler": "optim",
    "training": "train",
    "trainer": "train",
    "training_args": "train",
    "network": "model",
    "transformer": "model",
    "architecture": "model",
    "dataset": "data",
    "dataloader": "data",
    "corpus": "data",
    "deepspeed": "engine",
    "zero_optimization": "engine",
    "distributed": "engine",
    "parallel": "engine",
    "evaluation": "eval",
    "validation": "eval",
    "checkpointing": "checkpoint",
    "saving": "checkpoint",
    "logging": "metrics",
    "logger": "metrics",
    "log": "metrics",
    "wandb": "metrics",
    "tensorboard": "metrics",
}
"""Section in our settings for each section name in other programs' configuration files."""


def find_counterpart(name: str, known: Collection[str]) -> Counterpart | None:
    """Find the first row for the foreign `name` whose counterpart is among `known`. Returns None if there is no such
    row.

    A dotted name is looked up as a whole, then by its key, then by its section. A misspelt name is found too, unless a
    name in `known` is as similar. Rows with a counterpart take precedence over rows that have only a note.
    """
    rows = [row for row in COUNTERPARTS if row.here in known]
    rows += [row for row in COUNTERPARTS if not row.here and (not row.needs or row.needs in known)]
    by_name: dict[str, Counterpart] = {}
    for row in rows:
        for foreign in row.foreign.split():
            by_name.setdefault(_plain(foreign), row)
    if _plain(name) in map(_plain, known):
        return None  # ours, in another spelling
    section, _, key = name.rpartition(".")
    for candidate in (_plain(name), _plain(key)):
        if candidate in by_name:
            return by_name[candidate]
    if nearest(name, known, least_alike=SURE):
        return None
    near = nearest(_plain(key), by_name, least_alike=SURE)
    if near:
        return by_name[near[0]]
    is_our_section = any(other.startswith(f"{section}.") for other in known)
    if is_our_section:
        return None
    return by_name.get(_plain(section.partition(".")[0]))


def find_command(word: str, commands: Collection[str]) -> str:
    """Return the last part of a message about an unknown command, which suggests our command for the same purpose.

    The text begins with a blank, and is empty if no known command is similar.
    """
    for others, (ours, remark) in FOREIGN_COMMANDS.items():
        if word.lower() in others.split() and ours.split()[0] in commands:
            return f" Did you mean `txl {ours}`?" + (f" {remark}" if remark else "")
    return did_you_mean(word, commands)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
