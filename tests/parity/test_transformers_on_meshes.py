"""Meshes against transformers: eight steps on the same samples, loss by loss, in fp32.

TESSERA_DEVICE=cuda: both on a GPU, which ranks share.
"""

import os
import struct

import pytest
import torch
import transformers
from runs import configuration, metrics, train

DEVICE = os.environ.get("TESSERA_DEVICE", "cpu")
STEPS, SAMPLES, LENGTH, VOCAB, RATE = 8, 4, 16, 101, 1e-2
ROTARY = dict(vocab_size=VOCAB, max_position_embeddings=32, num_hidden_layers=3, bos_token_id=1, eos_token_id=2,
              hidden_size=40, intermediate_size=92, num_attention_heads=4, num_key_value_heads=2)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=40, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
    "llama": lambda: transformers.LlamaConfig(rms_norm_eps=1e-5, **ROTARY),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=12, tie_word_embeddings=True, **ROTARY),
    "mistral": lambda: transformers.MistralConfig(sliding_window=6, **ROTARY),
    "qwen3_window": lambda: transformers.Qwen3Config(
        head_dim=12, use_sliding_window=True, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], **ROTARY),
    # Else token 1 pads: its embedding gets no gradient.
    "olmo2": lambda: transformers.Olmo2Config(pad_token_id=None, **ROTARY),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        head_dim=12, query_pre_attn_scalar=10, sliding_window=6, sliding_window_pattern=3, pad_token_id=None, **ROTARY),
    "phi3": lambda: transformers.Phi3Config(pad_token_id=None, **ROTARY),
    # transformers adds no auxiliary loss here: its output_router_logits is off.
    "mixtral": lambda: transformers.MixtralConfig(
        num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.0, **ROTARY),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, head_dim=12,
        router_aux_loss_coef=0.0, **ROTARY),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, n_shared_experts=1,
        moe_intermediate_size=24, first_k_dense_replace=1, routed_scaling_factor=1.5, q_lora_rank=20,
        kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=10, num_nextn_predict_layers=0,
        **{**ROTARY, "num_key_value_heads": 4}),
}
# transformers does not move the bias.
MORE = {"deepseek_v3": ["--model.moe.bias_balance=false"]}
SP = ["--tensor.sequence_parallel=true"]
MESHES = {
    "tp 2": (2, ["--mesh.tp=2"]),
    "tp 4 with sp": (4, ["--mesh.tp=4", *SP]),
    "cp 2": (2, ["--mesh.cp=2"]),
    "pp 2": (2, ["--mesh.pp=2"]),
    "pp 3": (3, ["--mesh.pp=3"]),
    "zero 3": (2, ["--mesh.dp=2", "--zero.stage=3"]),
    "16 ranks": (16, ["--mesh.pp=2", "--mesh.dp=2", "--mesh.cp=2", "--mesh.tp=2", "--zero.stage=3", *SP]),
}
ULYSSES = {"cp ulysses 2": (2, ["--mesh.cp=2", "--context.method=ulysses"])}
EXPERT_MESHES = {
    "ep 2": (2, ["--mesh.dp=2", "--mesh.ep=2"]),
    "ep 4": (4, ["--mesh.dp=4", "--mesh.ep=4"]),
    "tp 2, ep 2": (2, ["--mesh.tp=2", "--mesh.ep=2"]),
    "tp 2, etp 2": (2, ["--mesh.tp=2", "--mesh.etp=2"]),
    "16 ranks, ep 4": (16, ["--mesh.pp=2", "--mesh.dp=2", "--mesh.cp=2", "--mesh.tp=2", "--mesh.ep=4",
                            "--zero.stage=3", *SP]),
}
NEW_EXPERTS = ["tp 2", "cp 2", "pp 2", "zero 3", "ep 2", "tp 2, etp 2", "16 ranks, ep 4"]
CASES = [(name, mesh) for name in CONFIGS
         for mesh in (EXPERT_MESHES if name == "mixtral" else
                      [*MESHES, *ULYSSES] if name in ("mistral", "qwen3_window") else
                      NEW_EXPERTS if name in ("qwen3_moe", "deepseek_v3") else MESHES)]


def make_model(config, seed):
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def steps_of_transformers(model, ids, samples=SAMPLES):
    """Each step's output and loss. Step s takes samples from s * samples on; sample k the tokens from k * LENGTH on."""
    model, ids = model.to(DEVICE), ids.to(DEVICE)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                                  lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    model.train()
    for step in range(STEPS):
        rows = [ids[k * LENGTH:k * LENGTH + LENGTH + 1] for k in range(step * samples, (step + 1) * samples)]
        batch = torch.stack(rows)
        optimizer.zero_grad()
        output = model(input_ids=batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(output.logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        yield output, loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def losses_of_transformers(model, ids):
    losses = []
    for _, loss in steps_of_transformers(model, ids):
        loss.backward()
        losses.append(loss.item())
    return losses


def made_folder(folder, model):
    """The model and as many random tokens as the steps take."""
    model.save_pretrained(folder / "model")
    ids = torch.randint(VOCAB, (STEPS * SAMPLES * LENGTH + 1,), generator=torch.Generator().manual_seed(5))
    (folder / "ids.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids.tolist()))
    return ids


def configuration_of(folder, run_folder, samples=SAMPLES, **sections):
    source = {"from": str(folder / "model"), "load_weights": True}
    return configuration({"train": str(folder / "ids.bin")}, run_folder, only_model=source,
                         run={"steps": STEPS, "device": DEVICE}, data={"seq_len": LENGTH, "shuffle": False},
                         batch={"global": samples, "micro": 1}, optimizer={"lr": RATE, "clip_norm": 1.0},
                         schedule={"type": "constant", "warmup": 0}, **{"checkpoint": {"every": 0}, **sections})


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """By name: a folder with the model and the tokens, and the losses that transformers has."""
    made = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        model = make_model(config(), len(name))
        ids = made_folder(folder, model)
        made[name] = (folder, losses_of_transformers(model, ids))
    return made


@pytest.mark.parametrize("name, mesh", CASES)
def test_eight_steps(program, peers, tmp_path, name, mesh):
    folder, theirs = peers[name]
    world, arguments = (MESHES | ULYSSES | EXPERT_MESHES)[mesh]
    train(program, configuration_of(folder, tmp_path), "--nproc", str(world), "--ranks", "threads", *arguments,
          *MORE.get(name, []))
    ours = [line["loss"] for line in metrics(tmp_path)]
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=2e-5)


# Theirs is of all samples and layers at once: so is ours of a batch.
@pytest.mark.parametrize("world, arguments", [
    (1, []), (2, ["--mesh.dp=2"]), (2, ["--mesh.tp=2"]), (2, ["--mesh.cp=2"]), (2, ["--mesh.dp=2", "--mesh.ep=2"]),
    (4, ["--mesh.dp=2", "--mesh.tp=2", "--mesh.ep=4", *SP, "--recompute.mode=block", "--zero.stage=3"])],
    ids=["one rank", "dp 2", "tp 2", "cp 2", "ep 2", "dp 2 x sp 2, ep 4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_eight_steps_with_the_auxiliary_loss_of_a_batch(program, tmp_path, name, world, arguments):
    weight = 0.1
    config = CONFIGS[name]()
    config.router_aux_loss_coef, config.output_router_logits = weight, True
    model = make_model(config, 3)
    ids = made_folder(tmp_path, model)
    path = configuration_of(tmp_path, tmp_path)
    samples = SAMPLES // (2 if "--mesh.dp=2" in arguments else 1)
    train(program, path, "--nproc", str(world), "--ranks", "threads", "--model.moe.balance=batch",
          f"--batch.micro={samples}", *arguments)
    theirs = []
    for output, loss in steps_of_transformers(model, ids):
        (loss + weight * output.aux_loss).backward()
        theirs.append((loss.item(), output.aux_loss.item()))
    lines = metrics(tmp_path)
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in theirs], rel=2e-5)
    assert [line["aux_loss"] for line in lines] == pytest.approx([aux for _, aux in theirs], rel=2e-5)


# Of a sample and a layer ours is a mean of one by one: with one of each they are the same.
@pytest.mark.parametrize("world, arguments", [
    (1, []), (4, ["--mesh.cp=2", "--mesh.tp=2", "--mesh.ep=4", *SP]),
    (4, ["--mesh.cp=2", "--mesh.tp=2", "--mesh.ep=2", "--mesh.etp=2"])],
    ids=["one rank", "ep 4", "ep 2, etp 2"])
def test_eight_steps_with_the_auxiliary_loss(program, tessera, tmp_path, world, arguments):
    weight = 0.1
    model = make_model(transformers.MixtralConfig(
        num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=weight, output_router_logits=True,
        **{**ROTARY, "num_hidden_layers": 1}), 1)
    ids = made_folder(tmp_path, model)
    path = configuration_of(tmp_path, tmp_path, samples=1, checkpoint={"every": STEPS})
    train(program, path, "--nproc", str(world), "--ranks", "threads", *arguments)
    theirs = []
    for output, loss in steps_of_transformers(model, ids, samples=1):
        (loss + weight * output.aux_loss).backward()
        theirs.append((loss.item(), output.aux_loss.item()))
    lines = metrics(tmp_path)
    assert [line["loss"] for line in lines] == pytest.approx([loss for loss, _ in theirs], rel=2e-5)
    assert [sum(line["expert_load"]) for line in lines] == pytest.approx([1.0] * STEPS)
    assert [line["aux_loss"] for line in lines] == pytest.approx([aux for _, aux in theirs], rel=2e-5)
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "out")
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, a), b in zip(model.named_parameters(), trained.parameters(), strict=True):
        assert (a - b).norm() < 1e-4 * a.norm(), name
