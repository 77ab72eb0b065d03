"""Fine-tuning on conversations against transformers: eight steps of the loss on
answers alone (its labels are -100 elsewhere), loss by loss, in fp32."""

import json

import pytest
import torch
import transformers
from runs import configuration, metrics, train

import chats

STEPS, SAMPLES, LENGTH, RATE = 8, 4, 64, 1e-2
MESHES = {
    "one rank": (1, []),
    "micro-batches": (1, ["--batch.micro=1"]),
    "tp 2": (2, ["--mesh.tp=2"]),
    "zero 3": (2, ["--mesh.dp=2", "--zero.stage=3"]),
    "pp 2": (2, ["--mesh.pp=2", "--batch.micro=1"]),
    "cp 2": (2, ["--mesh.cp=2"]),
    "dp 4": (4, ["--mesh.dp=4", "--batch.micro=1"]),
    "threads around device 0": (1, ["--mesh.data_parallel=dp", "--mesh.dp=2"]),
}


def rows_of(tokenizer, records):
    """Ids and labels of each conversation, cut and filled up to LENGTH."""
    rows = []
    for record in records:
        both = tokenizer.apply_chat_template(
            record["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, counts = both["input_ids"][:LENGTH], both["assistant_masks"][:LENGTH]
        if not any(counts):
            continue
        labels = [token if counted else -100
                  for token, counted in zip(ids, counts, strict=True)]
        fill = LENGTH - len(ids)
        rows.append((ids + [tokenizer.eos_token_id] * fill, labels + [-100] * fill))
    return rows


def losses_of_transformers(model, rows, steps=STEPS):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        # Past the end the rows come once more.
        batch = [rows[k % len(rows)] for k in range(step * SAMPLES, (step + 1) * SAMPLES)]
        ids, labels = (torch.tensor(part) for part in zip(*batch, strict=True))
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def configuration_of(folder, run_folder, **data):
    source = {"from": str(folder / "model"), "load_weights": True}
    return configuration(
        {"train": str(folder / "chats.jsonl")}, run_folder, only_model=source,
        run={"steps": STEPS}, data={"format": "auto", "seq_len": LENGTH, "shuffle": False, **data},
        batch={"global": SAMPLES}, optimizer={"lr": RATE, "clip_norm": 1.0},
        schedule={"type": "constant", "warmup": 0}, checkpoint={"every": 0})


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    """A folder with a model, its tokenizer and conversations, and the losses
    that transformers has. Answers are of very different lengths: micro-batches
    and ranks count unlike many targets, and some none."""
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = chats.make_tokenizer(chats.template("llama3_training"))
    tokenizer.save_pretrained(folder / "model")
    records = [{"messages": chat["messages"]}
               for chat in chats.conversations() if not chat["tools"]]
    records += [{"messages": [{"role": "user", "content": "long " * (n % 60)},
                              {"role": "assistant", "content": "yes"}]}
                for n in range(0, 300, 20)]
    (folder / "chats.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records))
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=40, intermediate_size=92,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=LENGTH, rms_norm_eps=1e-5))
    model.save_pretrained(folder / "model")
    rows = rows_of(tokenizer, records)
    counts = [sum(label >= 0 for label in labels) for _, labels in rows]
    assert max(counts) > 4 * min(counts)
    return folder, losses_of_transformers(model, rows), counts


@pytest.mark.parametrize("mesh", MESHES)
def test_eight_steps_on_answers(mesh, program, peer, tmp_path):
    folder, theirs, _ = peer
    world, arguments = MESHES[mesh]
    train(program, configuration_of(folder, tmp_path), "--nproc", str(world),
          "--ranks", "threads", *arguments)
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(
        theirs, rel=2e-5)


def test_a_run_that_is_resumed_goes_on_with_the_same_samples(program, peer, tmp_path):
    folder, theirs, _ = peer
    path = configuration_of(folder, tmp_path)
    train(program, path, "--run.steps=3", "--checkpoint.every=3")
    train(program, path, "--checkpoint.every=3")
    assert [line["loss"] for line in metrics(tmp_path)] == pytest.approx(
        theirs, rel=2e-5)


def test_validation_and_eval_count_answers(program, tessera, peer, tmp_path):
    folder, _, counts = peer
    path = configuration_of(folder, tmp_path, valid=str(folder / "chats.jsonl"))
    train(program, path, "--run.steps=1", "--optimizer.lr=0")
    (line,) = metrics(tmp_path)
    said = json.loads(tessera(
        "eval", "--model", folder / "model", "--data", folder / "chats.jsonl",
        "--seq-len", LENGTH).splitlines()[-1])
    assert said["tokens"] == sum(counts)
    assert line["valid_loss"] == pytest.approx(said["loss"], rel=1e-5)
    # A folder knows of no run: what counts is said.
    path = configuration_of(folder, tmp_path / "all", valid=str(folder / "chats.jsonl"), loss_on="all")
    train(program, path, "--run.steps=1", "--optimizer.lr=0")
    (line,) = metrics(tmp_path / "all")
    both = json.loads(tessera("eval", "--model", folder / "model", "--data", folder / "chats.jsonl", "--seq-len", LENGTH,
                              "--data.loss_on=all").splitlines()[-1])
    assert both["tokens"] > said["tokens"]
    assert line["valid_loss"] == pytest.approx(both["loss"], rel=1e-5) != said["loss"]


def test_conversations_in_one_json_list(program, tessera, peer, tmp_path):
    folder, _, counts = peer
    rows = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    (tmp_path / "sharegpt.json").write_text(json.dumps(rows, indent=1))
    said = json.loads(tessera("eval", "--model", folder / "model", "--data", tmp_path / "sharegpt.json",
                              "--seq-len", LENGTH).splitlines()[-1])
    assert said["tokens"] == sum(counts)
    (tmp_path / "sharegpt.json").write_text(json.dumps([rows]))
    done = train(program, configuration_of(folder, tmp_path, train=str(tmp_path / "sharegpt.json"), format="chat"),
                 check=False)
    assert done.returncode == 78
    assert 'sharegpt.json: record 1 (line 1): is a list, not an object as {"messages": [{"role":' in done.stderr


def test_a_tuned_model_answers_what_it_learned_by_heart(program, tessera, peer, tmp_path):
    folder, _, _ = peer
    learned = tmp_path / "learned.jsonl"
    learned.write_text(json.dumps({"messages": [
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "who are you"},
        {"role": "assistant", "content": "a machine"}]}) + "\n")
    path = configuration_of(folder, tmp_path, train=str(learned))
    train(program, path, "--run.steps=40", "--batch.global=1", "--checkpoint.every=40", "--monitor.sample=40",
          "--monitor.sample_temperature=0")
    # What it writes meanwhile is the answer to the first question, as the template puts it.
    written = json.loads((tmp_path / "run" / "samples.jsonl").read_text())
    assert written["prompt"].endswith("<|end_header_id|>\n\n") and "who are you" in written["prompt"]
    assert written["text"] == "a machine"
    ask = ["--temperature", 0, "--chat", "--system", "be brief", "--prompt", "who are you"]
    assert tessera("generate", "--model", tmp_path / "run", *ask) == "a machine\n"
    # The template comes back with the rest of the folder that training began with.
    tessera("convert", "--from", tmp_path / "run", "--to", tmp_path / "hf")
    assert tessera("generate", "--model", tmp_path / "hf", *ask) == "a machine\n"
    # A folder without a template.
    (tmp_path / "hf" / "chat_template.jinja").unlink()
    tessera("generate", "--model", tmp_path / "hf", *ask, code=78, says=f"{tmp_path}/hf has no chat template")


def test_a_bad_record_and_a_bad_template_are_refused(tessera, peer, tmp_path):
    folder, _, _ = peer
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "assistant", "content": "x"}]}\n'
                   '{"messages": [{"role": "user", "content": "x"}]}\n')
    path = configuration_of(folder, tmp_path, train=str(bad))
    tessera("train", path, code=78, says=f"{bad}:2: no message is of the assistant")
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages|frobnicate }}")
    path = configuration_of(folder, tmp_path, chat_template=str(template))
    tessera("train", path, code=78, says=f"{template}: the chat template, line 1: the filter 'frobnicate' is not")
