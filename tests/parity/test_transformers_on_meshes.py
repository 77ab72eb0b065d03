"""Meshes against transformers: eight steps on the same samples, loss by loss, in fp32."""

import struct

import pytest
import torch
import transformers
from runs import configuration, metrics, train

STEPS, SAMPLES, LENGTH, VOCAB, RATE = 8, 4, 16, 101, 1e-2
ROTARY = dict(vocab_size=VOCAB, max_position_embeddings=32, num_hidden_layers=3, bos_token_id=1, eos_token_id=2,
              hidden_size=40, intermediate_size=92, num_attention_heads=4, num_key_value_heads=2)
CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=40, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2),
    "llama": lambda: transformers.LlamaConfig(rms_norm_eps=1e-5, **ROTARY),
    "qwen3": lambda: transformers.Qwen3Config(head_dim=12, tie_word_embeddings=True, **ROTARY),
}
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


def make_model(name):
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def losses_of_transformers(model, ids):
    """Step s takes samples s * SAMPLES and on; sample k the tokens from k * LENGTH on."""
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                                  lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    model.train()
    losses = []
    for step in range(STEPS):
        rows = [ids[k * LENGTH:k * LENGTH + LENGTH + 1] for k in range(step * SAMPLES, (step + 1) * SAMPLES)]
        batch = torch.stack(rows)
        optimizer.zero_grad()
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """By name: a model's folder, the token file, and what transformers computes."""
    made = {}
    for name in CONFIGS:
        folder = tmp_path_factory.mktemp(name)
        model = make_model(name)
        model.save_pretrained(folder / "model")
        ids = torch.randint(VOCAB, (STEPS * SAMPLES * LENGTH + 1,), generator=torch.Generator().manual_seed(5))
        (folder / "ids.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids.tolist()))
        made[name] = (folder, losses_of_transformers(model, ids))
    return made


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CONFIGS)
def test_eight_steps(program, peers, tmp_path, name, mesh):
    folder, theirs = peers[name]
    world, arguments = MESHES[mesh]
    source = {"from": str(folder / "model"), "load_weights": True}
    path = configuration({"train": str(folder / "ids.bin")}, tmp_path, run={"steps": STEPS}, only_model=source,
                         data={"seq_len": LENGTH, "shuffle": False}, batch={"global": SAMPLES, "micro": 1},
                         optimizer={"lr": RATE, "clip_norm": 1.0}, schedule={"type": "constant", "warmup": 0},
                         checkpoint={"every": 0})
    train(program, path, "--nproc", str(world), "--ranks", "threads", *arguments)
    ours = [line["loss"] for line in metrics(tmp_path)]
    assert len(ours) == STEPS
    assert ours == pytest.approx(theirs, rel=2e-5)
