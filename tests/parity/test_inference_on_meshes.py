"""tessera eval and tessera generate on meshes: what one rank says, from a checkpoint and from a Hugging Face folder."""

import json
import subprocess

import pytest
import tokenizers
import torch
import transformers
from runs import configuration, train

STEPS, LENGTH, VOCAB = 2, 16, 61
SIZES = {"llama": {}, "mixtral": {"moe": {"experts": 4, "top_k": 2}}}
MESHES = {
    "pp 2": ["--mesh.pp=2"],
    "tp 2": ["--mesh.tp=2"],
    "tp 2 with sp": ["--mesh.tp=2", "--tensor.sequence_parallel=true"],
    "cp 2": ["--mesh.cp=2"],
    "dp 2": ["--mesh.dp=2"],
    "zero 3": ["--mesh.dp_shard=2", "--zero.stage=3"],
    "8 ranks": ["--mesh.pp=2", "--mesh.tp=2", "--mesh.dp_shard=2", "--zero.stage=3"],
}
EXPERT_MESHES = {
    "ep 2": ["--mesh.dp_shard=2", "--mesh.ep=2", "--zero.stage=3"],
    "tp 2, ep 2": ["--mesh.tp=2", "--mesh.ep=2"],
    "hybrid, by replica": ["--mesh.dp_replicate=2", "--mesh.dp_shard=2", "--zero.stage=3", "--zero.expert_shard=dp_shard"],
}
# Of both sources; the other meshes from a checkpoint alone.
BASIC = ["pp 2", "tp 2", "cp 2", "zero 3", "ep 2"]
CASES = [(family, source, mesh)
         for family, meshes in (("llama", MESHES), ("mixtral", EXPERT_MESHES))
         for mesh in meshes for source in (["checkpoint", "folder"] if mesh in BASIC else ["checkpoint"])]


@pytest.fixture(scope="module")
def models(program, tessera, tokens, tmp_path_factory):
    """By family: a run, its Hugging Face folder, and what one rank says of 19 windows and a rest of 5."""
    made = {}
    for family, sizes in SIZES.items():
        folder = tmp_path_factory.mktemp(family)
        model = {"family": family, "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB,
                 "max_seq": LENGTH, **sizes}
        train(program, configuration(tokens, folder, only_model=model, run={"steps": STEPS},
                                     precision={"compute": "fp64"}, schedule={"warmup": 0},
                                     checkpoint={"every": STEPS}))
        tessera("convert", "--from", folder / "run", "--to", folder / "folder", "--dtype", "fp64")
        with open(tokens["valid"], "rb") as file:
            (folder / "ids.bin").write_bytes(file.read(2 * (19 * LENGTH + 6)))
        made[family] = folder
    return made


def words(models, family, source):
    folder = models[family]
    return ("eval", "--model", folder / ("run" if source == "checkpoint" else "folder"), "--data", folder / "ids.bin",
            "--format", "tokens_u16", "--dtype", "fp64", "--batch", 4)


def result(output):
    return json.loads(output.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tessera, models):
    """By family: what one rank says, of the run and of the folder alike."""
    said = {family: {result(tessera(*words(models, family, source)))["loss"] for source in ("checkpoint", "folder")}
            for family in models}
    assert all(len(losses) == 1 for losses in said.values())
    return {family: losses.pop() for family, losses in said.items()}


@pytest.mark.parametrize("family, source, mesh", CASES)
def test_eval(tessera, models, alone, family, source, mesh):
    meshed = result(tessera(*words(models, family, source), "--ranks", "threads", *(MESHES | EXPERT_MESHES)[mesh]))
    assert meshed["tokens"] == 19 * LENGTH + 5
    assert abs(meshed["loss"] - alone[family]) <= 1e-10 * alone[family]


def test_eval_of_tokens_that_experts_share_unevenly(tessera, models):
    odd = (*words(models, "mixtral", "checkpoint")[:-1], 3, "--seq-len", 15)
    meshed = result(tessera(*odd, "--ranks", "threads", "--mesh.tp=2", "--mesh.ep=2"))
    assert meshed["loss"] == pytest.approx(result(tessera(*odd))["loss"], rel=1e-10)


@pytest.mark.parametrize("choice", ["tokens", "experts"])
def test_eval_of_experts_with_a_capacity(program, tessera, tokens, tmp_path, choice):
    """The last window has that of its 5 tokens, also where they are filled up for ranks to cut."""
    model = {"family": "mixtral", "layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": VOCAB, "max_seq": LENGTH,
             "moe": {"experts": 4, "top_k": 2, "capacity_factor": 1.0, "choice": choice}}
    train(program, configuration(tokens, tmp_path, only_model=model, run={"steps": STEPS}, schedule={"warmup": 0},
                                 precision={"compute": "fp64"}, checkpoint={"every": STEPS}))
    with open(tokens["valid"], "rb") as file:
        (tmp_path / "ids.bin").write_bytes(file.read(2 * (LENGTH + 6)))
    said = ("eval", "--model", tmp_path / "run", "--data", tmp_path / "ids.bin", "--format", "tokens_u16", "--dtype",
            "fp64")
    one = result(tessera(*said))["loss"]
    for mesh in (MESHES["cp 2"], MESHES["tp 2 with sp"], ["--mesh.pp=2", "--mesh.cp=2"]):
        assert result(tessera(*said, "--ranks", "threads", *mesh))["loss"] == pytest.approx(one, rel=1e-10), mesh


def test_eval_of_processes(tessera, models, alone):
    output = tessera(*words(models, "llama", "checkpoint"), "--nproc", 2, "--mesh.pp=2")
    assert len(output.splitlines()) == 1
    assert result(output)["loss"] == pytest.approx(alone["llama"], rel=1e-10)


@pytest.mark.parametrize("family, arguments, told", [
    ("llama", ["--nproc", "3", "--mesh.pp=2"], "Start 2 ranks"),
    ("llama", ["--mesh.tp=3"], "Nearest mesh.tp: 2 or 4"),
    ("llama", ["--mesh.pp=4"], "Use 3 parts or fewer"),
    ("llama", ["--mesh.cp=3"], "Nearest"),
    ("llama", ["--mesh.cp=8", "--context.method=ulysses"], "Nearest mesh.cp: 4;"),
    ("llama", ["--mesh.dp=2", "--mesh.ep=2"], "no experts"),
    ("mixtral", ["--mesh.dp=3", "--mesh.ep=3"], "Nearest mesh.ep: 2 or 4"),
    ("llama", ["--mesh.data_parallel=dp"], "mesh.data_parallel"),
    ("llama", ["--batch.global=4"], "batch.global"),
    ("llama", ["--zero.bucket_mb=4"], "zero.bucket_mb"),
])
def test_eval_refuses(tessera_error, models, family, arguments, told):
    assert told in tessera_error(*words(models, family, "folder"), *arguments)


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """Random Hugging Face folders with a byte-level BPE tokenizer, by family."""
    text = " ".join(f"In the year {year} the river rose {year % 7} feet." for year in range(1800, 1850))
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], vocab_size=280, show_progress=False, special_tokens=["<|endoftext|>"])
    sizes = dict(vocab_size=301, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
                 initializer_range=0.2)
    folders = {}
    for family, config in {"llama": transformers.LlamaConfig(**sizes),
                           "qwen3": transformers.Qwen3Config(head_dim=12, tie_word_embeddings=True, **sizes),
                           "gpt2": transformers.GPT2Config(vocab_size=301, n_positions=64, n_embd=48, n_layer=3,
                                                           n_head=4, initializer_range=0.2, bos_token_id=0,
                                                           eos_token_id=0),
                           "mixtral": transformers.MixtralConfig(num_local_experts=4, num_experts_per_tok=2,
                                                                 **sizes)}.items():
        folders[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folders[family])
        tokenizer.save(str(folders[family] / "tokenizer.json"))
    return folders


@pytest.mark.parametrize("family, more, meshes", [
    ("llama", ["--temperature", 0], [["--mesh.tp=2"], ["--mesh.pp=2"], ["--mesh.pp=3", "--mesh.tp=2"]]),
    ("llama", ["--seed", 5], [["--mesh.tp=2"], ["--mesh.pp=2"]]),
    ("gpt2", ["--temperature", 0], [["--mesh.tp=2"], ["--mesh.pp=2"]]),
    ("qwen3", ["--temperature", 0], [["--mesh.pp=2", "--mesh.tp=2"]]),
    ("mixtral", ["--temperature", 0], [["--mesh.pp=2"], ["--mesh.tp=2"], ["--mesh.tp=2", "--mesh.ep=2"]]),
])
def test_text(tessera, writer, family, more, meshes):
    text_words = ("generate", "--model", writer[family], "--prompt", "In the year 1812", "--max-tokens", 20, "--dtype",
                  "fp64", *more)
    alone = tessera(*text_words)
    for mesh in meshes:
        assert tessera(*text_words, "--ranks", "threads", *mesh) == alone, mesh


def test_text_of_processes(tessera, writer):
    text_words = ("generate", "--model", writer["llama"], "--prompt", "In", "--max-tokens", 8, "--temperature", 0)
    assert tessera(*text_words, "--nproc", 2, "--mesh.tp=2") == tessera(*text_words)


# Of 4 heads and 3 layers: tp 2, tp 4, pp 3, tp 2 x pp 3.
@pytest.mark.parametrize("ranks", [2, 4, 3, 6])
def test_ranks_without_a_mesh_share_out_the_model(tessera, writer, ranks):
    text_words = ("generate", "--model", writer["llama"], "--prompt", "In", "--max-tokens", 8, "--temperature", 0,
                  "--dtype", "fp64")
    assert tessera(*text_words, "--nproc", ranks, "--ranks", "threads") == tessera(*text_words)


@pytest.mark.parametrize("arguments, told", [
    (["--mesh.cp=2"], "Nearest mesh.cp: 1"),
    (["--mesh.dp=2"], "mesh.dp 1"),
    (["--nproc", "7"], "mesh.dp 1"),
    (["--nproc", "2", "--mesh.dp=2"], "mesh.dp 1"),
    (["--mesh.tp=3"], "Nearest mesh.tp: 2 or 4"),
    (["--tensor.sequence_parallel=true", "--mesh.tp=2"], "tensor.sequence_parallel"),
    (["--zero.stage=3"], "zero.stage"),
])
def test_generate_refuses(tessera_error, writer, arguments, told):
    assert told in tessera_error("generate", "--model", writer["llama"], "--prompt", "a", *arguments)


@pytest.fixture
def tessera_error(program):
    """What the program says on its way out with 78."""
    def run(*arguments):
        done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 78, done.stderr[-2000:]
        return done.stderr

    return run
