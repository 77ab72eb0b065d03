"""Packed documents that do not see each other: what one would give alone, on every mesh."""

import json
import random
import struct

import pytest
import tokenizers
import torch
import transformers
import year_model
from fuzz import verify
from runs import configuration, metrics, train
from test_fine_tuning import peer  # noqa: F401: conversations and their model

STEPS, SAMPLES, LENGTH, RATE = 8, 4, 32, 1e-2
SP = ["--tensor.sequence_parallel=true"]
MESHES = {
    "one rank": (1, []),
    "micro-batches, recompute": (1, ["--batch.micro=1", "--recompute.mode=block"]),
    "threads around device 0": (1, ["--mesh.data_parallel=dp", "--mesh.dp=2"]),
    "zero 3": (2, ["--mesh.dp=2", "--zero.stage=3"]),
    "tp 2 with sp": (2, ["--mesh.tp=2", *SP]),
    "cp 2 ring": (2, ["--mesh.cp=2"]),
    "cp 2 ulysses": (2, ["--mesh.cp=2", "--context.method=ulysses"]),
    "cp 4 allgather": (4, ["--mesh.cp=4", "--context.method=allgather"]),
    "pp 2 interleaved": (2, ["--mesh.pp=2", "--pipeline.schedule=interleaved", "--pipeline.chunks=2", "--batch.micro=2"]),
    "pp 3": (3, ["--mesh.pp=3", "--batch.micro=1"]),
    "16 ranks": (16, ["--mesh.pp=2", "--mesh.dp=2", "--mesh.cp=2", "--mesh.tp=2", "--zero.stage=3", *SP]),
}
GPT2 = transformers.GPT2Config(
    vocab_size=320, n_positions=LENGTH, n_embd=40, n_layer=4, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
LLAMA = transformers.LlamaConfig(
    vocab_size=320, hidden_size=40, intermediate_size=92, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=0)


def documents():
    """From one word to more than a sample."""
    rng = random.Random(4)
    words = year_model.TEXT.split()
    return [" ".join(words[at:at + rng.choice([1, 2, 5, 9, 40])])
            for at in (rng.randrange(len(words) - 40) for _ in range(60))]


def stream_of(tokenizer, texts):
    """Their tokens, and of each where its document begins."""
    ids, begins = [], []
    for text in texts:
        ids += [0] * bool(ids)  # ends the one before
        begins += [begins[-1]] if begins else []
        begin = len(ids)
        ids += tokenizer.encode(text).ids
        begins += [begin] * (len(ids) - begin)
    return ids, begins


def apart(model, ids, begins, first):
    """Logits of a sample, the last of which may be short: each of its documents alone."""
    logits, at, stop = [], first, min(first + LENGTH, len(ids) - 1)
    while at < stop:
        end = at
        while end < stop and begins[end] == begins[at]:
            end += 1
        logits.append(model(input_ids=torch.tensor([ids[at:end]])).logits[0])
        at = end
    return torch.cat(logits)


def loss_of(model, ids, begins, samples):
    logits = torch.cat([apart(model, ids, begins, k * LENGTH) for k in samples])
    targets = torch.tensor([ids[k * LENGTH + 1 + i] for k in samples for i in range(LENGTH)])
    return torch.nn.functional.cross_entropy(logits, targets)


def loss_of_all(model, ids, begins):
    """Also of the tokens that fill no sample."""
    logits = torch.cat([apart(model, ids, begins, first) for first in range(0, len(ids) - 1, LENGTH)])
    return torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]))


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def trained(request, tmp_path_factory):
    """A folder with a model and documents, and what transformers has: losses of steps, of samples, of all tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    _, _, tokenizer = year_model.save(folder)
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config({"gpt2": GPT2, "llama": LLAMA}[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    texts = documents()
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ids, begins = stream_of(tokenizer, texts)
    total = (len(ids) - 1) // LENGTH
    with torch.no_grad():
        held = loss_of(model, ids, begins, range(total)).item()
        of_all = loss_of_all(model, ids, begins).item()
        assert (len(ids) - 1) % LENGTH > 0 and of_all != held
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                                  lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, ids, begins, [k % total for k in range(step * SAMPLES, (step + 1) * SAMPLES)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return folder, losses, held, of_all


def run_file(folder, run_folder, **data):
    return configuration(
        {"train": str(folder / "texts.jsonl")}, run_folder, only_model={"from": str(folder), "load_weights": True},
        run={"steps": STEPS}, batch={"global": SAMPLES}, optimizer={"lr": RATE, "clip_norm": 1.0},
        schedule={"type": "constant", "warmup": 0}, checkpoint={"every": 0},
        data={"format": "auto", "seq_len": LENGTH, "shuffle": False, "intra_document_masking": True, **data})


# GPT-2's positions count from a document's begin, which each mesh does in its own way.
@pytest.mark.parametrize("trained, mesh", [
    *(("gpt2", mesh) for mesh in MESHES),
    *(("llama", mesh) for mesh in ["one rank", "tp 2 with sp", "cp 2 ring", "cp 2 ulysses", "16 ranks"]),
], indirect=["trained"])
def test_eight_steps_of_documents(mesh, program, trained, tmp_path):
    folder, theirs, _, _ = trained
    world, arguments = MESHES[mesh]
    train(program, run_file(folder, tmp_path), "--nproc", str(world), "--ranks", "threads", *arguments)
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(theirs, rel=2e-5)


def test_across_borders_is_another_model(program, trained, tmp_path):
    folder, theirs, _, _ = trained
    train(program, run_file(folder, tmp_path, intra_document_masking=False))
    first = metrics(tmp_path)[0]["loss"]
    assert abs(first - theirs[0]) > 1e-4 * theirs[0]


def test_of_token_files_the_tokenizer_says_what_ends_one(program, tessera, trained, tmp_path):
    folder, theirs, held, _ = trained
    ids = tmp_path / "ids.u16"
    tokens, _ = stream_of(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), documents())
    ids.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    train(program, run_file(folder, tmp_path, train=str(ids), format="tokens_u16"), "--nproc", "2", "--mesh.pp=2",
          "--run.steps=2", "--checkpoint.every=2")
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(theirs[:2], rel=2e-5)
    said = json.loads(tessera("eval", "--model", tmp_path / "run", "--data", ids, "--format", "tokens_u16",
                              "--seq-len", LENGTH).splitlines()[-1])
    assert said["loss"] < held


@pytest.mark.parametrize("arguments", [[], ["--nproc", "2", "--mesh.pp=2"], ["--nproc", "2", "--mesh.cp=2"]])
def test_validation_and_eval(arguments, program, tessera, trained, tmp_path):
    folder, _, held, of_all = trained
    texts = folder / "texts.jsonl"
    train(program, run_file(folder, tmp_path, valid=str(texts)), *arguments, "--run.steps=1", "--optimizer.lr=0",
          "--checkpoint.every=1")
    [line] = metrics(tmp_path)
    assert line["valid_loss"] == pytest.approx(held, rel=2e-5)
    said = json.loads(tessera("eval", "--model", tmp_path / "run", "--data", texts, "--seq-len", LENGTH,
                              *arguments).splitlines()[-1])
    assert said["loss"] == pytest.approx(of_all, rel=2e-5)


# Packed or not, a conversation is what it would be alone.
def test_packed_conversations_do_not_see_each_other(program, peer, tmp_path):  # noqa: F811
    folder, _, counts = peer
    said = []
    for packing in (False, True):
        path = configuration(
            {"train": str(folder / "chats.jsonl")}, tmp_path / str(packing),
            only_model={"from": str(folder / "model"), "load_weights": True},
            run={"steps": 1}, batch={"global": 4}, optimizer={"lr": 0}, schedule={"warmup": 0},
            data={"format": "auto", "seq_len": 64, "valid": str(folder / "chats.jsonl"), "packing": packing})
        done = train(program, path)
        said.append(metrics(tmp_path / str(packing))[-1]["valid_loss"])
        assert f"of which {sum(counts)} count" in done.stderr
    assert said[1] == pytest.approx(said[0], rel=1e-6)


VERIFIED = {
    "gpt2, ulysses 2 x tp 2": ("gpt2", {"mesh": {"cp": 2, "tp": 2}, "context": {"method": "ulysses"}}),
    "gpt2, ring 4 x zero 2": ("gpt2", {"mesh": {"cp": 4, "dp_shard": 2}, "zero": {"stage": 2}}),
    "gpt2, sp 2 x pp 2": ("gpt2", {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence_parallel": True}}),
    "qwen3, allgather 2 x zero 3": ("qwen3", {"mesh": {"cp": 2, "dp_shard": 2}, "zero": {"stage": 3}}),
    "mixtral, ep 2 x pp 2": ("mixtral", {"mesh": {"pp": 2, "dp_replicate": 2, "ep": 2},
                                         "model": {"moe": {"experts": 4, "top_k": 2}}}),
    "llama, 16 ranks": ("llama", {"mesh": {"pp": 2, "dp_shard": 2, "cp": 2, "tp": 2}, "zero": {"stage": 3},
                                  "recompute": {"mode": "block"}, "tensor": {"sequence_parallel": True}}),
}


@pytest.mark.parametrize("name", VERIFIED)
def test_a_mesh_equals_one_rank(program, name, tmp_path):
    family, sections = VERIFIED[name]
    model = {"family": family, "layers": 4, "hidden": 16, "heads": 4, "ffn": 24, "vocab": 41, "max_seq": 16,
             "kv_heads": 4 if family == "gpt2" else 2, **sections.get("model", {})}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({
        "run": {"steps": 3}, "data": {"seq_len": 16, "intra_document_masking": True}, "batch": {"global": 8},
        **sections, "model": model}))
    assert verify(program, path) == ""


@pytest.mark.parametrize("data, said", [
    ({"format": "tokens_u16", "train": "ids.u16"}, "set data.tokenizer"),
    ({"tokenizer": "bare.json"}, "no token that ends a document")])
def test_refused_before_ranks_start(program, trained, tmp_path, data, said):
    folder, _, _, _ = trained
    (tmp_path / "ids.u16").write_bytes(bytes(400))
    bare = json.loads((folder / "tokenizer.json").read_text())
    bare["added_tokens"] = []
    bare["model"]["vocab"].pop("<|endoftext|>")
    bare["model"]["vocab"] = {token: i for i, token in enumerate(bare["model"]["vocab"])}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    data = {key: str(tmp_path / value) if "." in value else value for key, value in data.items()}
    path = configuration(
        {"train": str(folder / "texts.jsonl")}, tmp_path,
        only_model={"family": "llama", "layers": 1, "hidden": 8, "heads": 2, "vocab": 320},
        data={"format": "auto", "seq_len": 8, "intra_document_masking": True, **data})
    done = train(program, path, "--nproc", "2", check=False)
    assert done.returncode == 78, done.stderr
    assert "data.intra_document_masking" in done.stderr and said in done.stderr
    assert "rank 1" not in done.stderr
