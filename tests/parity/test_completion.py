"""Commands, flags, keys and paths as bash, zsh and fish complete them, at a terminal of their own.

Words are typed with tabs among them, and then run: `tessera` is a function there, which tells its arguments."""

import os
import pty
import shutil
import signal
import subprocess
import time

import pytest

SHELLS = ["bash", "zsh", "fish"]
TOLD = "typed.txt"  # an argument a line; a last line when all are there
START = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"],
         "fish": ["fish", "--no-config", "-i"]}
# The second key inserts all that is offered.
BEGIN = {
    "bash": ["source <({program} completion bash)", "bind '\"\\C-t\": insert-completions'",
             "tessera() {{ printf '%s\\n' \"$@\" end >typed.txt; }}"],
    "zsh": ["autoload -U compinit && compinit -D -u", "source <({program} completion zsh)",
            "zstyle ':completion:all:*' completer _all_matches _complete; zstyle ':completion:all:*' insert yes",
            "zle -C all complete-word _generic; bindkey '^T' all; bindkey '^I' complete-word",
            "tessera() {{ printf '%s\\n' \"$@\" end >typed.txt }}"],
    "fish": ["{program} completion fish | source",
             "function tessera; printf '%s\\n' $argv end >typed.txt; end"],
}


@pytest.fixture
def folder(tmp_path):
    for name in ("text.txt", "run.json", "it's here.txt"):
        (tmp_path / name).touch()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").touch()
    return tmp_path


def as_run(program, shell, folder, lines, begin=None):
    """The words that each line ends as, which are typed so at one terminal."""
    assert shutil.which(shell), f"{shell} is not there: ./dev setup brings it"
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.environ |= {"TERM": "dumb", "HOME": str(folder), "PS1": "$ ", "COLUMNS": "4000"}
        os.execvp(shell, START[shell])
    os.set_blocking(terminal, False)
    shown = b""

    def run(line, is_done):
        # What is typed while a command runs would be no line of the editor: one after the other.
        nonlocal shown
        os.write(terminal, f"{line}\r".encode())
        deadline = time.monotonic() + 30
        while not is_done():
            assert time.monotonic() < deadline, shown.decode(errors="replace")
            try:
                shown += os.read(terminal, 65536)
            except BlockingIOError:
                time.sleep(0.01)
        time.sleep(0.05)  # for the prompt

    try:
        for number, line in enumerate(begin or BEGIN[shell]):
            run(f"{line.format(program=program)}; : >begun{number}", (folder / f"begun{number}").exists)
        told = folder / TOLD
        words = []
        for line in lines:
            told.unlink(missing_ok=True)
            run(line, lambda: told.exists() and told.read_text().endswith("end\n"))
            words.append(told.read_text().splitlines()[:-1])
        return words
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
        for begun in folder.glob("begun*"):
            begun.unlink()


def offered(program, shell, folder, lines):
    """By line, all that may stand in the place of its last word."""
    if shell == "fish":
        script = f"{program} completion fish | source; for line in $argv; complete -C $line; echo =; end"
        done = subprocess.run(["fish", "--no-config", "-c", script, *lines], cwd=folder, capture_output=True, text=True,
                              timeout=120, env={**os.environ, "HOME": str(folder)})
        assert not done.stderr
        found = [[word.split("\t")[0] for word in part.split("\n") if word] for part in done.stdout.split("\n=\n")]
    else:
        typed = [len(line.split()) - (0 if line.endswith(" ") else 1) - 1 for line in lines]
        found = as_run(program, shell, folder, [line + "\x14" for line in lines])
        found = [words[count:] for words, count in zip(found, typed, strict=True)]
    return dict(zip(lines, found, strict=False))


TAB = "\t"


LINES = [
    (f"tessera gen{TAB}", ["generate"]),
    (f"tessera tok{TAB}enc{TAB}--sp{TAB}", ["tokenize", "encode", "--special-tokens"]),
    (f"tessera train ru{TAB}--data.tr{TAB}tex{TAB}", ["train", "run.json", "--data.train=text"]),
    (f"tessera train ru{TAB}--data.tr{TAB}text.{TAB}--optimizer.wei{TAB}1",
     ["train", "run.json", "--data.train=text.txt", "--optimizer.weight_decay=1"]),
    (f"tessera train --data.train=texts/o{TAB}", ["train", "--data.train=texts/one.txt"]),
    (f"tessera train --data.train=it{TAB}", ["train", "--data.train=it's here.txt"]),
    (f"tessera generate --dt{TAB}b{TAB}--ranks=th{TAB}", ["generate", "--dtype", "bf16", "--ranks=threads"]),
    (f"tessera train run.json --comm.back{TAB}gl{TAB}", ["train", "run.json", "--comm.backend=gloo"]),
    (f"tessera eval --data text.{TAB}--data it{TAB}", ["eval", "--data", "text.txt", "--data", "it's here.txt"]),
    (f"tessera report texts/o{TAB}", ["report", "texts/one.txt"]),
]


@pytest.mark.parametrize("shell", SHELLS)
def test_lines_are_completed(program, shell, folder):
    lines, words = zip(*LINES, strict=True)
    assert as_run(program, shell, folder, lines) == list(words)


WORDS_OF = {  # exactly
    "tessera completion ": {"bash", "fish", "zsh"},
    "tessera tokenize ": {"train", "encode", "decode"},
    "tessera tokenize encode --dtype ": {"u16", "u32"},
    "tessera train --ranks=": {"processes", "threads"},
}
AMONG = {  # what is, and what is not
    "tessera ": ({"train", "generate", "bench", "launch", "plan"}, set()),
    "tessera tokenize encode --": ({"--tokenizer", "--dtype"}, {"--data.train="}),
    "tessera bench comm --": ({"--backend", "--plot", "--no-check"}, {"--data.train="}),
    "tessera bench kernels --": ({"--json", "--threads", "--seconds"}, {"--backend", "--data.train="}),
    "tessera generate -": ({"-n", "-h", "--help", "--help-all", "--prompt", "--mesh.tp=", "--comm.backend="},
                           {"--data.train=", "--optimizer.lr=", "--zero.stage="}),
    "tessera eval --": ({"--zero.stage=", "--cache"}, {"--optimizer.lr="}),
    "tessera train --": ({"--optimizer.lr=", "--resume"}, set()),
    "tessera verify --": ({"--optimizer.lr=", "--shrink"}, set()),
    "tessera inspect --": ({"--verify"}, {"--optimizer.lr="}),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_what_is_taken_is_offered(program, shell, folder):
    found = offered(program, shell, folder, [*WORDS_OF, *AMONG])
    for line, words in WORDS_OF.items():
        # A shell may show the whole word, or insert it before the first value alone.
        assert {word.split("=")[-1] for word in found[line]} == words, line
    for line, (taken, others) in AMONG.items():
        words = found[line]
        assert len(words) == len(set(words)), words
        assert taken <= set(words), (line, taken - set(words))
        assert not others & set(words), (line, others & set(words))


def test_zsh_finds_it_in_fpath(program, folder):
    (folder / "functions").mkdir()
    text = subprocess.run([program, "completion", "zsh"], capture_output=True, text=True, timeout=120).stdout
    (folder / "functions" / "_tessera").write_text(text)
    begin = ["fpath=($PWD/functions $fpath)", "autoload -U compinit && compinit -D -u", "bindkey '^I' complete-word",
             BEGIN["zsh"][-1]]
    lines = [f"tessera gen{TAB}--mo{TAB}", f"tessera ev{TAB}"]
    assert as_run(program, "zsh", folder, lines, begin) == [["generate", "--model"], ["eval"]]
