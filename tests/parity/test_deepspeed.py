"""DeepSpeed's JSON: the run that it means is the one that RUN.json can say itself."""

import json

import pytest
from runs import assert_same_bits, checkpoint, configuration, metrics, train

# What stands in RUN.json beside model and data, where DeepSpeed's file has the rest.
OPEN = {"run": {"steps": 8}, "checkpoint": {"every": 8}}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}
ADAMW = {"type": "adamw", "lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1, "clip_norm": 0}
MIXTRAL = {"family": "mixtral", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 61,
           "max_seq": 16}

# DeepSpeed's file, the sections of RUN.json that mean the same, and the model.
SAME = {
    "zero 2, accumulation": (
        {"train_batch_size": 12, "gradient_accumulation_steps": 3, "optimizer": ADAM,
         "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "overlap_comm": True}},
        {"batch": {"global": 12, "micro": 2}, "optimizer": ADAMW, "schedule": {"type": "constant"},
         "zero": {"stage": 2}}, None),
    "zero 3, bf16, decay, clipping": (
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, "optimizer": ADAM,
         "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3,
                                                           "total_num_steps": 7}},
         "bf16": {"enabled": True}, "gradient_clipping": 0.5, "zero_optimization": {"stage": 3}},
        {"batch": {"global": 12, "micro": 3}, "optimizer": {**ADAMW, "clip_norm": 0.5}, "zero": {"stage": 3},
         "precision": {"compute": "bf16"},
         "schedule": {"type": "linear", "convention": "deepspeed", "warmup": 3, "warmup_type": "log", "steps": 7}}, None),
    "zero 1, fp16": (
        {"train_batch_size": 12, "optimizer": ADAM, "zero_optimization": {"stage": 1},
         "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 30, "hysteresis": 2,
                  "loss_scale_window": 3, "min_loss_scale": 1}},
        {"batch": {"global": 12}, "optimizer": ADAMW, "schedule": {"type": "constant"}, "zero": {"stage": 1},
         "precision": {"compute": "fp16", "initial_loss_scale": 2.0**30, "scale_hysteresis": 2,
                       "scale_growth_interval": 3}}, None),
    "experts": (
        {"train_batch_size": 12, "zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
         "moe": {"enabled": True, "num_experts": 4, "k": 2, "expert_parallel_size": 2}},
        {"batch": {"global": 12}, "zero": {"stage": 1}, "schedule": {"type": "constant"}, "mesh": {"ep": 2},
         "model": {"moe": {"experts": 4, "top_k": 2}},
         "optimizer": {"type": "lion", "lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0, "clip_norm": 0}}, MIXTRAL),
}


def run_json(tokens, folder, only_model=None, **sections):
    """As the other tests' configuration, without what DeepSpeed's file says."""
    path = configuration(tokens, folder, dict(only_model) if only_model else None, **OPEN)
    with open(path) as file:
        config = json.load(file)
    for section in ("batch", "precision", "optimizer", "schedule"):
        del config[section]
    for section, values in sections.items():
        config.setdefault(section, {}).update(values)
    with open(path, "w") as file:
        json.dump(config, file, indent=1)
    return path


def ds_json(folder, values):
    (folder / "ds.json").write_text(json.dumps(values, indent=1))
    return str(folder / "ds.json")


def losses(folder):
    return [(line["loss"], line["grad_norm"], line["lr"]) for line in metrics(folder)]


@pytest.mark.parametrize("name", SAME)
def test_it_trains_what_run_json_would(program, tokens, tmp_path, name):
    values, sections, model = SAME[name]
    one, other, again = tmp_path / "one", tmp_path / "other", tmp_path / "again"
    path = run_json(tokens, one, model)
    train(program, path, "--deepspeed", ds_json(one, values), "--nproc", "2")
    train(program, run_json(tokens, other, model, **sections), "--nproc", "2")
    assert losses(one) == losses(other) and len(losses(one)) == 8
    assert_same_bits(checkpoint(one, 8), checkpoint(other, 8))
    # What the run wrote down is enough.
    train(program, str(one / "run" / "config.json"), f"--run.dir={again}", "--nproc", "2")
    assert losses(one) == losses(again)


@pytest.mark.parametrize("values, worlds, refused", [
    ({"train_batch_size": 32, "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
      "zero_optimization": {"stage": 2, "allgather_partitions": True, "reduce_scatter": True, "overlap_comm": True,
                            "allgather_bucket_size": 2e8}},
     {1: 32, 2: 16, 4: 8, 8: 4, 16: 2, 32: 1}, {3: "32 = 3 x ? x ?"}),
    ({"train_batch_size": 64, "zero_optimization": {"stage": 2},
      "moe": {"enabled": True, "num_experts": 32, "k": 2, "expert_parallel_size": 8}},
     {8: 8, 16: 4, 32: 2, 64: 1}, {1: "mesh.ep", 2: "mesh.ep", 4: "mesh.ep", 12: "mesh.ep", 24: "64 = 24 x ? x ?"}),
], ids=["A", "B"])
def test_worlds_of_the_two_files(program, tokens, tmp_path, values, worlds, refused):
    path = run_json(tokens, tmp_path, MIXTRAL if "moe" in values else None)
    for world in {**worlds, **refused}:
        done = train(program, path, "--deepspeed", ds_json(tmp_path, values), "--nproc", str(world), "--dry-run",
                     check=False)
        if world in worlds:
            assert f"micro {worlds[world]} x accumulation 1 x data-parallel degree {world};" in done.stdout, done.stderr
            assert done.returncode == 0
        else:
            assert done.returncode == 78 and refused[world] in done.stderr, done.stderr


@pytest.mark.parametrize("values, arguments, words", [
    ({"fp16": {"enabled": True, "loss_scale": -1.5}}, [], ["ds.json:4:", "fp16.loss_scale", "precision.loss_scale"]),
    ({"train_batchsize": 12}, [], ["ds.json:2:2", "train_batchsize", "train_batch_size"]),
    ({"train_batch_size": 12}, ["--batch.global=8"], ["--batch.global=8", "ds.json:2:22: train_batch_size"]),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/none"}}}, [],
     ["zero.offload_folder", "/none", "No such file", "on a disk",
      "(zero.offload_folder: ", "ds.json:5:17: zero_optimization.offload_optimizer.nvme_path)"]),
    ({"tensor_parallel": {"autotp_size": 3}}, [], ["(mesh.tp: ", "ds.json:3:18: tensor_parallel.autotp_size"]),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, [],
     ["ds.json:3:14: bf16.enabled and ", "ds.json:6:14: fp16.enabled are both true", "leave its section out"]),
    ({"activation_checkpointing": {"number_checkpoints": -2}}, [],
     ["ds.json:3:25: activation_checkpointing.number_checkpoints is -2", "at least 0"]),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 0}}}, [],
     ["scheduler.params.total_num_steps is 0", "at least 1"]),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.5, "warmup_max_lr": 0.1}}}, [],
     ["schedule.start_lr (0.5) is above optimizer.lr (0.1)", "ds.json:5:21: scheduler.params.warmup_min_lr",
      "ds.json:6:21: scheduler.params.warmup_max_lr"]),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2,
                                                         "warmup_min_ratio": 1.5}}}, [],
     ["schedule.start_lr", "is above optimizer.lr", "scheduler.params.warmup_min_ratio"]),
    ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 8, "warmup_num_steps": 2,
                                                         "cos_min_ratio": 1.5}}}, [],
     ["schedule.min_lr", "is above optimizer.lr", "scheduler.params.cos_min_ratio"]),
])
def test_bad_input_is_refused_before_any_rank_starts(program, tokens, tmp_path, values, arguments, words):
    path = run_json(tokens, tmp_path)
    done = train(program, path, "--deepspeed", ds_json(tmp_path, values), "--nproc", "2", *arguments, check=False)
    assert done.returncode == 78, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


def test_print_config_shows_places(program, tokens, tmp_path):
    file = ds_json(tmp_path, {"train_batch_size": 12, "zero_optimization": {"stage": 1}})
    done = train(program, run_json(tokens, tmp_path), "--deepspeed", file, "--nproc", "2", "--print-config")
    rows = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert rows["zero.stage"].endswith(f"{file}:4:12: zero_optimization.stage")
    assert rows["batch.global"].endswith(f"{file}:2:22: train_batch_size")
    assert rows["data.seq_len"].split()[-1].startswith(str(tmp_path / "run.json"))
