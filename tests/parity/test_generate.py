"""tessera generate: its filters are transformers', its flags do what they say, also on a mesh."""

import functools
import json
import shutil
import subprocess

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
import year_model
from runs import started
from year_model import PROMPT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return year_model.save(tmp_path_factory.mktemp("folder"))[0]


@pytest.fixture(scope="module")
def generate(program, folder):
    def run(*arguments, code=0, prompt=("--prompt", PROMPT), **options):
        done = subprocess.run(
            [program, "generate", "--model", folder, *prompt, *map(str, arguments)],
            capture_output=True, text=True, timeout=300, **options)
        assert done.returncode == code, done.stderr[-2000:]
        return done

    return run


@pytest.fixture(scope="module")
def alone(generate):
    """What one rank says and writes with these flags, made once."""
    return functools.lru_cache(maxsize=None)(generate)


MESHES = [[], ["--mesh.pp=2"], ["--mesh.tp=2", "--ranks", "threads"]]


@pytest.mark.parametrize("temperature, top_k, top_p, min_p, penalty", [
    (1.0, 0, 1.0, 0.0, 1.0),
    (0.7, 0, 1.0, 0.0, 1.0),
    (1.0, 7, 1.0, 0.0, 1.0),
    (1.3, 0, 0.6, 0.0, 1.0),
    (1.0, 9, 0.5, 0.0, 1.0),  # the share is of the nine
    (1.0, 0, 1.0, 0.2, 1.0),
    (0.9, 20, 0.95, 0.1, 1.4),
    (1.0, 0, 1.0, 0.0, 0.8),
])
def test_filters_are_those_of_transformers(temperature, top_k, top_p, min_p, penalty, program, tmp_path):
    torch.manual_seed(1)
    ids = torch.randint(40, (1, 12))
    logits = 3 * torch.randn(1, 40, dtype=torch.float64)
    logits[0, 5] = logits[0, 6] = logits[0, 7]  # ties
    safetensors.torch.save_file({"logits": logits[0], "ids": ids[0]}, tmp_path / "in.safetensors")
    subprocess.run([program.parents[1] / "tests" / "model_driver", "filter", tmp_path / "in.safetensors",
                    tmp_path / "out.safetensors", *map(str, (temperature, top_k, top_p, min_p, penalty))], check=True)
    ours = safetensors.torch.load_file(tmp_path / "out.safetensors")["scores"]
    processors = [transformers.RepetitionPenaltyLogitsProcessor(penalty)] if penalty != 1 else []
    processors += [transformers.TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    processors += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    processors += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    processors += [transformers.MinPLogitsWarper(min_p)] if min_p else []
    theirs = transformers.LogitsProcessorList(processors)(ids, logits)[0]
    assert torch.equal(ours.isinf(), theirs.isinf())
    kept = ~ours.isinf()
    assert torch.allclose(ours[kept], theirs[kept], rtol=1e-14)


def test_repetition_penalty_of_greedy_text(generate, folder):
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    # Ids without a text are never drawn.
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
                              repetition_penalty=1.3, pad_token_id=0,
                              suppress_tokens=list(range(tokenizer.get_vocab_size(), 320)))
    text = generate("--max-tokens", 20, "--temperature", 0, "--repetition-penalty", 1.3).stdout
    assert text.rstrip("\n") == tokenizer.decode(expected[0].tolist()).rstrip("\n")


def test_generation_config_says_what_ends_a_text(program, generate, folder, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids])
    written = transformers.LlamaForCausalLM.from_pretrained(folder).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, pad_token_id=0,
        suppress_tokens=list(range(tokenizer.get_vocab_size(), 320)))[0, prompt.size(1):].tolist()
    flags = ["--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0"]
    assert generate(*flags, prompt=()).stdout == PROMPT + tokenizer.decode(written) + "\n"
    copy = tmp_path / "folder"
    shutil.copytree(folder, copy)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [319, written[3]]}))
    done = subprocess.run([program, "generate", "--model", copy, *flags], capture_output=True, text=True, check=True)
    assert done.stdout == PROMPT + tokenizer.decode(written[:written.index(written[3])]) + "\n"


@pytest.mark.parametrize("mesh", MESHES)
def test_stop_ends_the_text_before_it(mesh, generate, alone):
    whole = alone("--max-tokens", 30, "--seed", 5).stdout
    written = whole[len(PROMPT):]
    stop, other = written[10:13], "never in a text"
    text = generate("--max-tokens", 30, "--seed", 5, "--stop", other, "--stop", stop, *mesh).stdout
    assert text == PROMPT + written[:written.index(stop)] + "\n"


def test_a_stop_in_the_prompt_does_not_end_it(generate):
    assert generate("--max-tokens", 5, "--stop", "river", "--seed", 2).stdout == \
        generate("--max-tokens", 5, "--seed", 2).stdout


@pytest.mark.parametrize("mesh", MESHES)
def test_samples_are_different_texts(mesh, generate, alone):
    one = alone("--max-tokens", 8, "--seed", 3).stdout
    three = generate("--max-tokens", 8, "--seed", 3, "-n", 3, *mesh).stdout
    head, *texts = three.split("--- ")
    assert head == "" and len(texts) == 3
    texts = [text.split(" of 3 ---\n")[1] for text in texts]
    assert texts[0] == one  # the first is that of -n 1
    assert len(set(texts)) == 3
    assert all(text.startswith(PROMPT) for text in texts)


@pytest.mark.parametrize("mesh", MESHES)
def test_texts_that_are_all_the_same_are_warned_of(mesh, generate):
    for flags in ("--temperature", 0), ("--top-k", 1):
        done = generate("--max-tokens", 3, "-n", 2, *flags, *mesh)
        assert done.stderr.count("-n 2 has no effect") == 1, done.stderr
    assert "no effect" not in generate("--max-tokens", 3, "-n", 2, *mesh).stderr
    assert "no effect" not in generate("--max-tokens", 3, "--temperature", 0, *mesh).stderr


@pytest.mark.parametrize("mesh", MESHES)
def test_the_prompt_from_a_file_and_from_standard_input(mesh, generate, alone, tmp_path):
    flags = ["--max-tokens", 8, "--seed", 4]
    expected = alone(*flags).stdout
    (tmp_path / "prompt.txt").write_text(PROMPT + "\n")
    assert generate(*flags, *mesh, prompt=("--prompt-file", tmp_path / "prompt.txt")).stdout == expected
    for words in (("--prompt-file", "-"), ("--prompt-file=-",)):
        assert generate(*flags, *mesh, prompt=words, input=PROMPT).stdout == expected


@pytest.mark.parametrize("mesh", MESHES)
def test_it_is_said_where_the_model_cuts(mesh, generate):
    done = generate("--max-tokens", 100, *mesh)
    assert done.stderr.count("model.max_seq is 64") == 1, done.stderr
    assert "asked for 100" in done.stderr
    assert "max_seq" not in generate("--max-tokens", 10, *mesh).stderr


@pytest.mark.parametrize("flags, named", [
    (["--temperature", "-1"], "--temperature"),
    (["--temperature", "nan"], "--temperature"),
    (["--top-k", "-1"], "--top-k"),
    (["--top-k", "2.5"], "--top-k"),
    (["--top-p", "0"], "--top-p"),
    (["--top-p", "1.1"], "--top-p"),
    (["--min-p", "2"], "--min-p"),
    (["--repetition-penalty", "0"], "--repetition-penalty"),
    (["--max-tokens", "0"], "--max-tokens"),
    (["--max-tokens", str(2**63)], "--max-tokens"),
    (["--seed", "-1"], "--seed"),
    (["--seed", str(2**64)], "--seed"),
    (["-n", "0"], "-n"),
    (["--stop", ""], "--stop"),
    (["--dtype", "int8"], "--dtype"),
    (["--nproc", str(2**64 + 1)], "--nproc"),
    (["--prompt-file", "x"], "--prompt"),  # beside --prompt
])
def test_bad_flags_are_refused_before_anything_is_loaded(flags, named, program):
    # The model is not looked for: there is none.
    done = subprocess.run([program, "generate", "--model", "nowhere", "--prompt", "a", *flags],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr and len(done.stderr) < 400
    assert done.stdout == ""


# Of a LibTorch without CUDA; a rank by itself is refused as several are.
@pytest.mark.parametrize("flag, named", [
    ("--run.device=cuda", ["run.device is cuda", "./dev build --cuda"]),
    ("--run.device=tpu", ['"tpu" is none of auto, cpu, cuda']),
    ("--comm.backend=nccl", ["comm.backend", "nccl"]),
])
def test_devices_that_are_not_there_are_refused(flag, named, generate, folder, program, tmp_path):
    done = [generate(flag, code=78)]
    (tmp_path / "text.txt").write_text(PROMPT)
    done.append(subprocess.run([program, "eval", "--model", folder, "--data", tmp_path / "text.txt", flag],
                               capture_output=True, text=True, timeout=120))
    for each in done:
        assert each.returncode == 78 and each.stdout == ""
        assert all(words in each.stderr for words in named), each.stderr


def test_a_text_ends_where_nobody_reads_it(program, folder):
    with started(program, "generate", "--model", folder, "--prompt", PROMPT, "--max-tokens", 4, "-n", 1000000,
                 stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout.read(1)
        reader.stdout.close()
        assert reader.wait(60) == 0, reader.stderr.read()


def test_nothing_is_printed_of_a_prompt_that_is_refused(generate):
    done = generate(code=78, prompt=("--prompt", PROMPT * 20))
    assert done.stdout == "" and "max_seq 64" in done.stderr


@pytest.mark.parametrize("mesh", MESHES)
def test_weights_that_are_no_numbers_are_named(mesh, folder, program, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for temperature in (0, 1):
        done = subprocess.run([program, "generate", "--model", tmp_path, "--prompt", "a", *mesh,
                               "--temperature", str(temperature)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1, done.stderr
        assert "logits are no numbers" in done.stderr
