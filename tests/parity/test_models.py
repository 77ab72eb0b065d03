"""Models against transformers: logits, training steps, folders both ways.

Every model is made here, small, random and of odd sizes. What runs Tessera is
model_driver.cpp, built beside the other test programs.
"""

import json
import os
import subprocess

import pytest
import safetensors.torch
import torch
import transformers
from runs import assert_close, assert_same_bits, configuration, train

VOCAB, POSITIONS = 101, 48

ROTARY = dict(
    vocab_size=VOCAB,
    max_position_embeddings=POSITIONS,
    num_hidden_layers=3,
    bos_token_id=1,
    eos_token_id=2,
)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=36, n_layer=3, n_head=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=2),
    "gpt2_untied_narrow": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=20, n_layer=2, n_head=5,
        n_inner=52, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2),
    "llama_grouped": lambda: transformers.LlamaConfig(
        hidden_size=60, intermediate_size=92, num_attention_heads=6,
        num_key_value_heads=2, rms_norm_eps=1e-5, **ROTARY),
    "llama_tied_wide_heads": lambda: transformers.LlamaConfig(
        hidden_size=42, intermediate_size=72, num_attention_heads=3,
        num_key_value_heads=1, head_dim=18, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, **ROTARY),
    "qwen2_tied": lambda: transformers.Qwen2Config(
        hidden_size=56, intermediate_size=88, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, **ROTARY),
    "mistral": lambda: transformers.MistralConfig(
        hidden_size=40, intermediate_size=60, num_attention_heads=4, num_key_value_heads=2, sliding_window=7,
        **ROTARY),
    "mistral_full": lambda: transformers.MistralConfig(
        hidden_size=36, intermediate_size=56, num_attention_heads=3, num_key_value_heads=1, head_dim=16,
        sliding_window=None, **ROTARY),
    "qwen2_window": lambda: transformers.Qwen2Config(
        hidden_size=48, intermediate_size=72, num_attention_heads=4, num_key_value_heads=2,
        use_sliding_window=True, sliding_window=5, max_window_layers=1, **ROTARY),
    "qwen3_by_layer": lambda: transformers.Qwen3Config(
        hidden_size=44, intermediate_size=76, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        use_sliding_window=True, sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], **ROTARY),
    "mixtral_window": lambda: transformers.MixtralConfig(
        hidden_size=40, intermediate_size=52, num_attention_heads=4, num_key_value_heads=2, num_local_experts=6,
        num_experts_per_tok=3, router_aux_loss_coef=0.0, sliding_window=6, **ROTARY),
    "qwen3_moe_window": lambda: transformers.Qwen3MoeConfig(
        hidden_size=44, intermediate_size=60, moe_intermediate_size=28, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
        router_aux_loss_coef=0.0, use_sliding_window=True, sliding_window=8, **ROTARY),
    "qwen3": lambda: transformers.Qwen3Config(
        hidden_size=44, intermediate_size=76, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, **ROTARY),
    # Its pad_token_id would be 1, a token like others here, whose embedding
    # transformers then gives no gradient.
    "olmo2_grouped": lambda: transformers.Olmo2Config(
        hidden_size=48, intermediate_size=76, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=None,
        rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, **ROTARY),
    # The same. Of three layers the second sees all.
    "gemma3": lambda: transformers.Gemma3TextConfig(
        hidden_size=44, intermediate_size=76, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        query_pre_attn_scalar=24, sliding_window=9, sliding_window_pattern=2, pad_token_id=None,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}, **ROTARY),
    "gemma3_scaled": lambda: transformers.Gemma3TextConfig(
        hidden_size=40, intermediate_size=52, num_attention_heads=4, num_key_value_heads=1, head_dim=8,
        query_pre_attn_scalar=8, sliding_window=5, tie_word_embeddings=False, pad_token_id=None,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}, **ROTARY),
    "phi3": lambda: transformers.Phi3Config(
        hidden_size=60, intermediate_size=92, num_attention_heads=6, num_key_value_heads=2, pad_token_id=None,
        rope_parameters={"rope_theta": 25e4, "rope_type": "default"}, **ROTARY),
    "phi3_tied_window": lambda: transformers.Phi3Config(
        hidden_size=40, intermediate_size=52, num_attention_heads=4, pad_token_id=None, tie_word_embeddings=True,
        sliding_window=11, **ROTARY),
    "llama_scaled": lambda: transformers.LlamaConfig(
        hidden_size=40, intermediate_size=60, num_attention_heads=4, num_key_value_heads=2,
        rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16}, **ROTARY),
    "qwen3_yarn": lambda: transformers.Qwen3Config(
        hidden_size=44, intermediate_size=76, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 3.0,
                         "original_max_position_embeddings": 16}, **ROTARY),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        hidden_size=44, intermediate_size=60, moe_intermediate_size=28, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True,
        router_aux_loss_coef=0.0, **ROTARY),
    "qwen3_moe_sparse": lambda: transformers.Qwen3MoeConfig(
        hidden_size=40, intermediate_size=52, moe_intermediate_size=20, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=5, num_experts_per_tok=2, norm_topk_prob=False,
        mlp_only_layers=[0], router_aux_loss_coef=0.0, **ROTARY),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        hidden_size=48, intermediate_size=60, moe_intermediate_size=20, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
        n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.5, q_lora_rank=20, kv_lora_rank=12,
        qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=14, num_nextn_predict_layers=0, **ROTARY),
    "deepseek_v3_yarn": lambda: transformers.DeepseekV3Config(
        hidden_size=40, intermediate_size=52, moe_intermediate_size=16, num_attention_heads=4,
        num_key_value_heads=4, n_routed_experts=6, num_experts_per_tok=2, n_group=1, topk_group=1,
        n_shared_experts=1, first_k_dense_replace=0, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=12, norm_topk_prob=False, num_nextn_predict_layers=0,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
                         "mscale_all_dim": 0.8, "original_max_position_embeddings": 16}, **ROTARY),
    "mixtral": lambda: transformers.MixtralConfig(
        hidden_size=40, intermediate_size=52, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=3,
        router_aux_loss_coef=0.0, **ROTARY),
}


def make_model(name, dtype=torch.float32):
    """A model whose every parameter, biases and norms included, is random."""
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.add_(0.05 * torch.randn_like(buffer))
    if hasattr(model.config, "num_experts_per_tok"):
        # Its grouped products take no double precision and few widths.
        model.set_experts_implementation("eager")
    return model.to(dtype)


@pytest.fixture(scope="session")
def drive(program):
    """Runs the driver; gives its output, or the message of a failure."""
    driver = program.parents[1] / "tests" / "model_driver"

    def run(*args, code=0):
        done = subprocess.run([driver, *map(str, args)], capture_output=True,
                              text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


def write_ids(path, *shape, repeat=1):
    torch.manual_seed(5)
    ids = torch.randint(VOCAB, shape).repeat(repeat, *[1] * (len(shape) - 1))
    safetensors.torch.save_file({"ids": ids}, path)
    return ids


def our_logits(drive, folder, tmp_path, dtype="F32"):
    ids = write_ids(tmp_path / "ids.safetensors", 2, 37)
    out = tmp_path / f"logits-{os.urandom(4).hex()}.safetensors"
    drive("logits", folder, tmp_path / "ids.safetensors", out, dtype)
    return ids, safetensors.torch.load_file(out)["logits"]


def their_logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def error(a, b):
    return (a.double() - b.double()).abs().max().item()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, drive, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path)
    assert error(logits, their_logits(model, ids)) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_double_precision(name, drive, tmp_path):
    # transformers rounds its rotary angles to fp32: not its formula, its ulp.
    model = make_model(name, torch.float64)
    model.save_pretrained(tmp_path / "model")
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path, "F64")
    tolerance = 1e-12 if name.startswith("gpt2") else 2e-5
    assert logits.dtype == torch.float64
    assert error(logits, their_logits(model, ids)) < tolerance


@pytest.mark.parametrize("dtype, word", [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_in_low_precision(name, dtype, word, drive, tmp_path):
    model = make_model(name, dtype)
    model.save_pretrained(tmp_path / "model")
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path, word)
    truth = their_logits(model.float(), ids)
    theirs = their_logits(model.to(dtype), ids)
    assert logits.dtype == dtype
    # Where two experts are about as good, rounding may choose the other one, theirs or ours.
    share = 0.5 if hasattr(model.config, "num_experts_per_tok") else 1.0
    ours, theirs = ((of.double() - truth.double()).abs().amax(-1).quantile(share) for of in (logits, theirs))
    assert ours < 1.5 * theirs


def weights_with_gradients(model):
    """All but the keys' bias: its gradient is zero but for rounding, along which Adam takes steps of full size."""
    for name, weight in model.named_parameters():
        if name.endswith("c_attn.bias"):
            query, _, value = weight.detach().chunk(3)
            yield from (query, value)
        elif not name.endswith("k_proj.bias"):
            yield weight.detach()


@pytest.mark.parametrize("name", CONFIGS)
def test_eight_training_steps(name, drive, tmp_path):
    # With these transformers itself ends up within 3e-6 of where it does from weights that differ by a rounding, in
    # every case; with a rate of 1e-2 and an eps of 1e-8, where Adam's first steps are as long for a gradient that is
    # all rounding as for any other, up to 4e-4 away.
    steps, learning_rate, eps = 8, 3e-3, 1e-5
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    ids = write_ids(tmp_path / "ids.safetensors", 2, 4, 33, repeat=steps // 2)
    lines = drive("train", tmp_path / "model", tmp_path / "ids.safetensors",
                  tmp_path / "out", "F32", learning_rate).split()
    ours = [float(word) for word in lines]
    theirs = []
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1},
         {"params": plain, "weight_decay": 0.0}],
        lr=learning_rate, betas=(0.9, 0.95), eps=eps)
    model.train()
    for batch in ids:
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        theirs += [loss.item(), norm.item()]
    assert len(ours) == 2 * steps
    assert theirs[-2] < theirs[0] - 0.3  # it learns: the steps matter
    assert ours[::2] == pytest.approx(theirs[::2], rel=2e-5)
    assert ours[1::2] == pytest.approx(theirs[1::2], rel=1e-4)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    a, b = (torch.cat([p.flatten() for p in weights_with_gradients(m)]) for m in (model, trained))
    assert (a - b).norm() < 2e-5 * a.norm()


@pytest.mark.parametrize("dtype, torch_dtype",
                         [("F32", torch.float32), ("BF16", torch.bfloat16)])
@pytest.mark.parametrize("name", CONFIGS)
def test_exported_folder_loads_in_transformers(name, dtype, torch_dtype,
                                               drive, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")
    drive("export", tmp_path / "model", tmp_path / "out", dtype)
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto")
    assert not any(report.values()), report
    assert back.dtype == torch_dtype
    assert back.config.eos_token_id == 2
    for (key, a), b in zip(model.state_dict().items(), back.state_dict().values()):
        kept = torch.float32 if key.endswith("e_score_correction_bias") else torch_dtype  # as transformers keeps it
        assert b.dtype == kept and torch.equal(a.to(kept), b), key
    ids, logits = our_logits(drive, tmp_path / "out", tmp_path)
    # Not what float() makes of it: numbers beside the weights are rounded as these are.
    wide = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert error(logits, their_logits(wide, ids)) < 1e-5


def rewrite_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["llama_tied_wide_heads", "qwen2_tied"])
def test_old_keys_of_config_json(name, drive, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "model")

    def age(config):
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None
        config["torch_dtype"] = config.pop("dtype")

    rewrite_config(tmp_path / "model", age)
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path)
    assert error(logits, their_logits(model, ids)) < 1e-5


# As transformers has it: a length beside them counts before the one among them, and of both objects the older one.
def test_where_scaled_positions_are_said(drive, tmp_path):
    model = make_model("llama_scaled")
    model.save_pretrained(tmp_path / "model")

    def move(config):
        rope = config["rope_parameters"]
        config["rope_scaling"] = {**rope, "original_max_position_embeddings": 24}
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}

    rewrite_config(tmp_path / "model", move)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path)
    assert error(logits, their_logits(theirs, ids)) < 1e-5


# Each form in which a layer's weights are laid out.
@pytest.mark.parametrize("name", ["gpt2", "llama_grouped", "phi3", "mixtral", "deepseek_v3"])
def test_sharded_safetensors(name, drive, tmp_path):
    model = make_model(name)
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    assert len(list((tmp_path / "model").glob("model-*.safetensors"))) > 2
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path)
    assert error(logits, their_logits(model, ids)) < 1e-5


# It removes the shards and leaves their index.
def test_a_single_file_that_transformers_saves_over_shards(drive, tmp_path):
    model = make_model("llama_grouped")
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path)
    assert error(logits, their_logits(model, ids)) < 1e-5


EXPERT_MESH = ["--nproc", "4", "--ranks", "threads", "--mesh.dp=2",
               "--mesh.tp=2", "--mesh.ep=2", "--mesh.etp=2"]


def folder_after(program, tessera, tokens, folder, source, steps, lr, *mesh):
    """What a run that starts from `source` converts to, in fp64."""
    path = configuration(
        tokens, folder, only_model={"from": str(source), "load_weights": True},
        run={"steps": steps}, checkpoint={"every": steps},
        precision={"compute": "fp64"}, optimizer={"lr": lr},
        schedule={"type": "constant", "warmup": 0})
    train(program, path, *mesh)
    tessera("convert", "--from", folder / "run", "--to", folder / "hf",
            "--dtype", "fp64")
    return (folder / "hf" / "config.json").read_text(), tensors_of(folder / "hf")


def tensors_of(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_experts_of_a_mesh_start_from_a_folder_and_end_in_one(
        program, tessera, tokens, tmp_path):
    source = tmp_path / "source"
    make_model("mixtral", torch.float64).save_pretrained(source)

    def after(name, *arguments):
        return folder_after(program, tessera, tokens, tmp_path / name, source,
                            *arguments)

    _, unchanged = after("unchanged", 1, 0.0, *EXPERT_MESH)
    assert_same_bits(tensors_of(source), unchanged)
    one_config, one = after("one", 3, 0.01)
    mesh_config, mesh = after("mesh", 3, 0.01, *EXPERT_MESH)
    assert mesh_config == one_config
    assert_close(one, mesh, 1e-10)
    moved = [key for key in one if torch.equal(one[key], unchanged[key])]
    assert moved == [], "these did not train"


@pytest.mark.parametrize("name", ["gpt2", "qwen2_tied"])
def test_base_model_without_prefix(name, drive, tmp_path):
    model = make_model(name)
    model.base_model.save_pretrained(tmp_path / "model")
    ids, logits = our_logits(drive, tmp_path / "model", tmp_path)
    assert error(logits, their_logits(model, ids)) < 1e-5


def test_every_misfit_is_named(drive, tmp_path):
    folder = tmp_path / "model"
    make_model("llama_grouped").save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.zeros(3)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    write_ids(tmp_path / "ids.safetensors", 1, 3)
    message = drive("logits", folder, tmp_path / "ids.safetensors",
                    tmp_path / "out.safetensors", "F32", code=74)
    assert 'missing "model.norm.weight"' in message
    assert 'unexpected "model.extra.weight"' in message
    assert name in message and "91" in message and "92" in message


def test_a_tied_head_that_differs_is_refused(drive, tmp_path):
    folder = tmp_path / "model"
    make_model("qwen2_tied").save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    write_ids(tmp_path / "ids.safetensors", 1, 3)
    for head, expected in [(embedding.clone(), 0), (embedding + 1, 74)]:
        safetensors.torch.save_file({**tensors, "lm_head.weight": head}, path)
        drive("logits", folder, tmp_path / "ids.safetensors",
              tmp_path / f"out-{expected}.safetensors", "F32", code=expected)


@pytest.mark.parametrize("name, key, value", [
    ("llama_grouped", "hidden_act", "gelu"),
    ("llama_grouped", "attention_bias", True),
    ("llama_grouped", "mlp_bias", True),
    ("llama_grouped", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("llama_grouped", "rope_parameters",
     {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0}),
    ("llama_grouped", "rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 0.5}),
    ("qwen3_moe", "mlp_only_layers", [1]),
    ("qwen3_moe", "num_experts_per_tok", 7),
    ("deepseek_v3", "rope_interleave", False),
    ("deepseek_v3", "scoring_func", "softmax"),
    ("llama_grouped", "partial_rotary_factor", 0.5),
    ("llama_grouped", "quantization_config", {"bits": 4}),
    ("llama_grouped", "model_type", "bloom"),
    ("llama_grouped", "num_attention_heads", 7),
    ("qwen3", "layer_types", ["sliding_attention"] * 3),
    ("qwen3_by_layer", "layer_types", ["chunked_attention"] * 3),
    ("qwen3_by_layer", "layer_types", ["sliding_attention"] * 2),
    ("mistral", "layer_types", ["sliding_attention", "full_attention", "sliding_attention"]),
    ("mistral", "model_type", "gpt_oss"),
    ("olmo2_grouped", "attention_bias", True),
    ("gpt2", "activation_function", "relu"),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("mixtral", "router_jitter_noise", 0.1),
    ("mixtral", "num_experts_per_tok", 7),
])
def test_what_is_not_supported_is_refused_by_name(name, key, value, drive,
                                                  tmp_path):
    make_model(name).save_pretrained(tmp_path / "model")
    rewrite_config(tmp_path / "model", lambda c: c.update({key: value}))
    write_ids(tmp_path / "ids.safetensors", 1, 3)
    message = drive("logits", tmp_path / "model",
                    tmp_path / "ids.safetensors",
                    tmp_path / "out.safetensors", "F32", code=78)
    named = "model.heads" if key == "num_attention_heads" else key
    assert named in message


def philox(counter, key):
    """Salmon et al. 2011, Philox4x32-10: arrays of 32-bit words."""
    import numpy as np

    low, words = np.uint64(0xFFFFFFFF), [np.asarray(word, dtype=np.uint64) for word in counter]
    keys = [np.uint64(word) for word in key]
    for _ in range(10):
        products = np.uint64(0xD2511F53) * words[0], np.uint64(0xCD9E8D57) * words[2]
        words = [(products[1] >> np.uint64(32)) ^ words[1] ^ keys[0], products[1] & low,
                 (products[0] >> np.uint64(32)) ^ words[3] ^ keys[1], products[0] & low]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & low, (keys[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(np.broadcast_arrays(*words))


def mask(key, rate, first_sample, samples, heads, rows, columns):
    """As tessera/nn/dropout.h says: (samples, heads, rows, columns)."""
    import numpy as np

    b, h, r, c = np.ogrid[first_sample:first_sample + samples, :heads, :rows, :columns]
    words = philox((c // 64 * 16 + c % 16, r, h, b), key)
    which = np.broadcast_to(c % 64 // 16, words.shape[1:])[None]
    drawn = np.take_along_axis(words, which, 0)[0]
    return torch.from_numpy((drawn >= int(rate * 2**32)) / (1 - rate))


def test_dropout_is_that_of_transformers_with_our_masks(drive, tmp_path, monkeypatch):
    rate, first, samples, tokens = 0.2, 6, 2, 37
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=36, n_layer=2, n_head=3, resid_pdrop=rate, embd_pdrop=rate,
        attn_pdrop=rate, bos_token_id=1, eos_token_id=2, attn_implementation="eager")
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "model")
    ids = write_ids(tmp_path / "ids.safetensors", samples, tokens + 1)
    out = tmp_path / "out.safetensors"
    said = drive("dropped", tmp_path / "model", tmp_path / "ids.safetensors", out, 9, 4, first)
    keys = iter([tuple(map(int, line.split())) for line in said.splitlines()])

    def dropout(x, p=0.5, training=True, inplace=False):
        assert p == rate and training
        heads = x.shape[1] if x.dim() == 4 else 1
        drawn = mask(next(keys), rate, first, samples, heads, tokens, x.shape[-1])
        return x * drawn.reshape(x.shape)

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)
    logits = model(input_ids=ids[:, :-1]).logits
    assert next(keys, None) is None
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    loss.backward()
    ours = safetensors.torch.load_file(out)
    assert error(ours["logits"], logits.detach()) < 1e-12
    assert error(ours["gradient"], model.transformer.wpe.weight.grad) < 1e-10
    monkeypatch.undo()
    without = their_logits(model, ids[:, :-1])
    assert error(without, logits.detach()) > 0.1


@pytest.mark.parametrize("rates, taken", [((0.1, 0.1, 0.1), 0.1), ((0.1, 0.0, 0.1), 0.0), ((0.0, 0.0, 0.0), 0.0),
                                          ((), 0.1), ((0.1, 0.2), 0.0)])  # unsaid is 0.1: GPT2Config's
def test_rates_of_a_folder_are_taken_over_where_they_are_one(program, tokens, tmp_path, rates, taken):
    keys = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    transformers.GPT2Config(vocab_size=61, n_positions=POSITIONS, n_embd=36, n_layer=1, n_head=3, bos_token_id=1,
                            eos_token_id=2, **dict(zip(keys, rates))).save_pretrained(tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    unsaid = keys[len(rates):]
    config.write_text(json.dumps({key: value for key, value in json.loads(config.read_text()).items()
                                  if key not in unsaid}))
    path = configuration(tokens, tmp_path / "run", only_model={"from": str(tmp_path / "model")})
    for flags, expected in [((), taken), (("--model.dropout=0.3",), 0.3)]:
        done = subprocess.run([program, "train", path, "--print-config", *flags], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        [said] = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("model.dropout ")]
        assert float(said) == expected, done.stdout
        assert ("is not taken over" in done.stderr) == (len(set(rates)) > 1), done.stderr
