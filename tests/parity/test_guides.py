"""The guides, carried out: what a page tells its reader to type is typed, in its order, in an empty folder.

Of a page counts: a fenced block behind a line "`NAME`:", which is the file NAME; each block of sh, which must succeed;
and a block of text behind one of sh, whose lines must be among what that wrote, in order ("..." is anything). What is
needed beside (a model, data) is what the test puts into the folder, as the page says that it is there.
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import chats
import pytest
import torch
import transformers
from hosts import Hosts, why_not

ROOT = Path(__file__).resolve().parents[2]
GUIDES = ROOT / "docs" / "guides"
BLOCK = re.compile(r"^(?:`([^`\n]+)`:\n\n)?```(\w*)\n(.*?)^```$", re.M | re.S)


def blocks(page):
    """(file, language, text) of each fenced block."""
    return [(found[1], found[2], found[3]) for found in BLOCK.finditer((GUIDES / page).read_text())]


@pytest.fixture(scope="session")
def variables(program):
    path = f"{program.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


def assert_shown(expected, output, block):
    """Each line of `expected` is one of the output's, behind the one before."""
    lines = iter(output.splitlines())
    for wanted in expected.splitlines():
        pattern = re.escape(wanted).replace(r"\.\.\.", ".*")
        assert any(re.fullmatch(pattern, line) for line in lines), (
            f"{block}\ndid not show, or not in this order:\n{wanted}\nbut:\n{output[-3000:]}")


def on_one_core():
    """A process whose second thread would be waited for longer than it helps, on models so small."""
    worker = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "")) or 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[worker % len(cores)]})


def carry_out(page, folder, variables):
    """Returns what the blocks of sh wrote."""
    outputs = []
    for name, language, text in blocks(page):
        if name:
            (folder / name).write_text(text)
        elif language == "sh":
            done = subprocess.run(["bash", "-eu", "-c", text], cwd=folder, env=variables, timeout=300,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  preexec_fn=on_one_core)
            assert done.returncode == 0, f"{text}\nended with {done.returncode}:\n{done.stdout[-3000:]}"
            outputs.append(done.stdout)
            block = text
        elif language == "text":
            assert outputs, f"{page}: nothing has written\n{text}"
            assert_shown(text, outputs[-1], block)
    assert outputs
    return outputs


def test_readme(variables, tmp_path):
    words = random.Random(0).choices(["In", "the", "beginning", "was", "a", "word", "and", "it", "went", "home."], k=20000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    assert "In the beginning" in carry_out("../../README.md", tmp_path, variables)[0]


def test_own_data(variables, tmp_path):
    other = tmp_path / "runs" / "token_cache" / "tokens-0123456789abcdef.cache"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"of another run's text")
    carry_out("own_data.md", tmp_path, variables)
    assert not (tmp_path / "runs" / "birds").exists()


@pytest.mark.parametrize("page", sorted(path.name for path in GUIDES.glob("*.md")))
def test_every_page_is_carried_out(page):
    """By a test of its name; and what looks like a command is one that is typed, but for other launchers'."""
    assert f"test_{page.removesuffix('.md')}" in globals()
    for name, language, text in blocks(page):
        if language != "sh" and not name:
            assert not re.search(r"^(\$ )?tessera ", text, re.M) or language == "text", text


def small_run(folder, **sections):
    """The run.json of pages that speak of any run on text."""
    (folder / "text.txt").write_text("".join(f"In the beginning there were {n} cats, who slept.\n" for n in range(800)))
    config = {"run": {"name": "NAME", "steps": 40},
              "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "max_seq": 32},
              "data": {"train": "text.txt", "seq_len": 32}, "batch": {"global": 8}, "schedule": {"warmup": 5},
              "optimizer": {"lr": 3e-3}, "checkpoint": {"every": 20}, **sections}
    (folder / "run.json").write_text(json.dumps(config))


def test_validation(variables, tmp_path):
    small_run(tmp_path)
    carry_out("validation.md", tmp_path, variables)
    assert len((tmp_path / "runs/sampled/samples.jsonl").read_text().splitlines()) == 4


def test_figures(variables, tmp_path):
    small_run(tmp_path)
    carry_out("figures.md", tmp_path, variables)
    assert "</html>" in (tmp_path / "page.html").read_text()


def test_experts(variables, tmp_path):
    on_one_core()
    carry_out("experts.md", tmp_path, variables)
    [*_, last] = (tmp_path / "runs" / "experts" / "metrics.jsonl").read_text().splitlines()
    assert len(json.loads(last)["expert_imbalance"]) == 2


def test_precision(variables, tmp_path):
    carry_out("precision.md", tmp_path, variables)
    assert json.loads((tmp_path / "runs/halves/summary.json").read_text())["skipped_steps"] == 0


def test_optimizers(variables, tmp_path):
    carry_out("optimizers.md", tmp_path, variables)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "AVERAGED")


def test_pipelines(variables, tmp_path):
    small_run(tmp_path)
    carry_out("pipelines.md", tmp_path, variables)
    kept = json.loads((tmp_path / "runs/measured/config.json").read_text())
    assert not kept["mesh"]["measure_speeds"]


def test_deepspeed(variables, program, tmp_path):
    carry_out("deepspeed.md", tmp_path, variables)
    page = (GUIDES / "deepspeed.md").read_text()
    table = subprocess.run([program, "schema", "--deepspeed"], capture_output=True, text=True, check=True).stdout
    assert page.endswith("## Every key\n" + table), "its table is not what 'tessera schema --deepspeed' prints"


def test_finetuning(variables, tmp_path):
    tokenizer = chats.make_tokenizer(chats.template("qwen2_5"))
    tokenizer.save_pretrained(tmp_path / "MODEL")
    torch.manual_seed(7)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512)).save_pretrained(tmp_path / "MODEL")
    records = [{"prompt": f"Who are you, number {n}?", "completion": f"Tess {n}."} for n in range(60)]
    for name, some in (("chats.jsonl", records[:50]), ("chats_valid.jsonl", records[50:])):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in some))
    carry_out("finetuning.md", tmp_path, variables)
    for name in ("TUNED", "WHOLE"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
    assert (tmp_path / "TUNED" / "chat_template.jinja").is_file()
    assert (tmp_path / "ADAPTERS" / "adapter_config.json").is_file()


def test_own_module(variables, program, tmp_path):
    program_of_page, *_ = [text for _, language, text in blocks("own_module.md") if language == "cpp"]
    assert program_of_page == (ROOT / "examples" / "04_own_loop.cpp").read_text()
    (cmake,) = [text for _, language, text in blocks("own_module.md") if language == "cmake"]
    theirs = (ROOT / "examples" / "external_project" / "CMakeLists.txt").read_text()
    for line in cmake.splitlines():
        words = line.split("#")[0].strip().replace("my_program", "uses_tessera").replace("MyProgram", "UsesTessera")
        assert words in theirs, line
    path = f"{program.parents[1] / 'examples'}:{variables['PATH']}"
    (output,) = carry_out("own_module.md", tmp_path, {
        **variables, "PATH": path, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1"})
    steps = re.findall(r"^step .*", output, re.M)
    assert len(steps) == 16 and steps[:4] == steps[4:8] == steps[8:12] == steps[12:]


@pytest.fixture
def nodes():
    """Two hosts that know each other as node0 and node1."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(2) as hosts:
        folders = [Path("/etc/netns") / hosts.name(f"host{host}") for host in range(2)]
        for folder in folders:
            folder.mkdir(parents=True)
            names = "".join(f"{hosts.address(host)} node{host}\n" for host in range(2))
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        yield hosts
        for folder in folders:
            (folder / "hosts").unlink()
            folder.rmdir()


def assert_all_end(ranks):
    outputs = []
    try:
        for rank in ranks:
            outputs.append(rank.communicate(timeout=300)[0])
            assert rank.returncode == 0, outputs[-1][-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return outputs


def start(nodes, host, command, folder, variables):
    return nodes.start(host, ["bash", "-eu", "-c", command], variables, cwd=folder,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def slurms_variables(rank):
    return {"SLURM_JOB_ID": str(4000 + os.getpid() % 1000), "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank),
            "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2),
            "SLURM_STEP_NODELIST": "node[0-1]", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}


def test_several_hosts(variables, nodes, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"In the beginning there were {n} cats.\n" for n in range(400)))
    for name, language, text in blocks("several_hosts.md"):
        if name:
            (tmp_path / name).write_text(text)
        elif language == "sh":
            first, *commands = re.split(r"^# on node\d\n", text, flags=re.M)
            if first.strip():  # what each host does before: the ranks below have the token that it makes
                at_home = {**variables, "HOME": str(tmp_path)}
                then = subprocess.run(["bash", "-euc", f"{first}\nenv"], cwd=tmp_path, env=at_home, check=True,
                                      capture_output=True, text=True).stdout
                variables = dict(line.split("=", 1) for line in then.splitlines() if "=" in line)
                assert Path(variables["TESSERA_TOKEN_FILE"]).stat().st_mode & 0o77 == 0
                continue
            assert len(commands) == 2
            outputs = assert_all_end([start(nodes, host, command, tmp_path, variables)
                                      for host, command in enumerate(commands)])
        elif language == "text":
            assert_shown(text, outputs[0], "on node0")
    # srun, which is not here: each line of the job that it starts, with the variables that Slurm sets.
    (command,) = re.findall(r"^srun (.*)", (tmp_path / "job.sh").read_text(), re.M)
    assert_all_end([start(nodes, rank // 2, command, tmp_path, {**variables, **slurms_variables(rank)})
                    for rank in range(4)])
    lines = [(tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines() for name in ("four", "slurm")]
    losses, of_slurm = [[json.loads(line)["loss"] for line in each] for each in lines]
    assert losses == of_slurm and len(losses) == 20


def test_planning(variables, tmp_path):
    carry_out("planning.md", tmp_path, variables)
    assert json.loads((tmp_path / "fast.json").read_text())["mesh"]["pp"] == 2
