"""Tests of scripts/: python3 -m unittest discover -s tests/scripts."""

import contextlib
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import check_docs  # noqa: E402
import check_rooms  # noqa: E402
import fuzz  # noqa: E402
import lint  # noqa: E402
import quickstart_summary  # noqa: E402
import quickstart_text  # noqa: E402
import summarize_tests  # noqa: E402


class Readme(unittest.TestCase):
    def test_its_program_is_the_example_that_is_built_and_run(self):
        root = Path(__file__).resolve().parents[2]
        readme = (root / "README.md").read_text()
        program = readme.split("```cpp\n")[1].split("```")[0]
        self.assertEqual(program, (root / "examples/01_data_parallel.cpp").read_text())


class CheckRooms(unittest.TestCase):
    def faults_of(self, name, text):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.parent.mkdir(parents=True)
            path.write_text(text)
            return list(check_rooms.faults(folder, [name]))

    def test_downward_and_own_includes_are_fine(self):
        text = ('#include "tessera/comm/group.h"\n'
                '#include "tessera/core/detail/json.h"\n'
                '#include "tessera/comm/base/worker.h"\n')
        self.assertEqual(self.faults_of("tessera/comm/x.cpp", text), [])

    def test_parts_of_sources_are_sources(self):
        self.assertIn("upward", self.faults_of("tessera/comm/x.inc", '#include "tessera/train/trainer.h"\n')[0])

    def test_upward_include(self):
        text = '#include "tessera/train/trainer.h"\n'
        self.assertIn("upward", self.faults_of("tessera/comm/x.h", text)[0])

    def test_strategies_do_not_include_each_other(self):
        text = '#include "tessera/parallel/data/data.h"\n'
        name = "tessera/parallel/tensor/x.cpp"
        self.assertIn("each other", self.faults_of(name, text)[0])
        self.assertEqual(self.faults_of("tessera/parallel/compose.cpp", text), [])
        self.assertEqual(self.faults_of("tessera/parallel/data/x.cpp", text), [])

    def test_what_is_private_stays_inside(self):
        text = '#include "tessera/core/detail/json.h"\n'
        self.assertIn("private", self.faults_of("tessera/data/x.h", text)[0])
        text = '#include "tessera/nn/detail/x.h"\n'
        self.assertIn("detail/", self.faults_of("tessera/models/x.cpp", text)[0])
        text = '#include "tessera/comm/shm/shm_backend.h"\n'
        self.assertIn("private", self.faults_of("tessera/comm/x.h", text)[0])
        self.assertEqual(self.faults_of("tessera/comm/shm/x.h", text), [])

    def tree_faults_of(self, includes, cmake):
        return list(check_rooms.check_tree(includes, check_rooms.depends_of(cmake)))

    def test_depends_are_the_rooms_that_are_included(self):
        cmake = ("tessera_room(core)\ntessera_room(comm MODULES DEPENDS core LINK ${M})\n"
                 "tessera_room(data DEPENDS core\n  comm LINK z)\n")
        comm = {"comm/x.h": {"core/error.h"}}
        both = {"data/x.cpp": {"core/error.h"}, "data/x_test.cpp": {"comm/x.h"}}
        self.assertEqual(self.tree_faults_of(comm | both, cmake), [])
        one = {"data/x.cpp": {"comm/x.h"}}  # core comes through comm
        self.assertEqual(self.tree_faults_of(comm | one, cmake),
                         ["data DEPENDS on core, and includes nothing of it"])
        self.assertEqual(self.tree_faults_of(comm | both, cmake.replace(" core LINK", " LINK")),
                         ["comm includes core, and DEPENDS does not say so"])
        self.assertEqual(self.tree_faults_of(both, cmake.replace("\n  comm", "")),
                         ["comm DEPENDS on core, and includes nothing of it",
                          "data includes comm, and DEPENDS does not say so"])

    def test_a_ring_of_files(self):
        ring = {"comm/a.h": {"comm/b.h"}, "comm/b.h": {"comm/c.h", "comm/d.h"},
                "comm/c.h": set(), "comm/d.h": {"comm/a.h"}}
        self.assertEqual(self.tree_faults_of(ring, "tessera_room(comm)"),
                         ["a ring of files: comm/a.h -> comm/b.h -> comm/d.h -> comm/a.h"])
        ring["comm/d.h"] = {"comm/c.h"}
        self.assertEqual(self.tree_faults_of(ring, "tessera_room(comm)"), [])

    def test_a_ring_of_folders(self):
        room = {"comm/group.h": set(), "comm/base/a.h": {"comm/group.h"},
                "comm/shm/b.h": {"comm/base/a.h"}, "comm/base/c.cpp": set()}
        self.assertEqual(self.tree_faults_of(room, "tessera_room(comm)"), [])
        mutual = room | {"comm/base/c.cpp": {"comm/shm/b.h"}}
        self.assertEqual(self.tree_faults_of(mutual, "tessera_room(comm)"),
                         ["a ring of folders: comm/base -> comm/shm -> comm/base"])
        longer = room | {"comm/verb.cpp": {"comm/shm/b.h"}}
        self.assertEqual(
            self.tree_faults_of(longer, "tessera_room(comm)"),
            ["a ring of folders: comm -> comm/shm -> comm/base -> comm"])

    def test_detail_counts_as_its_folder_and_tests_as_none(self):
        room = {"comm/a.cpp": {"comm/detail/b.h"}, "comm/detail/b.h": {"comm/c.h"},
                "comm/base/d_test.cpp": {"comm/shm/e.h"}, "comm/shm/e.h": {"comm/base/f.h"}}
        self.assertEqual(self.tree_faults_of(room, "tessera_room(comm)"), [])

    def test_house_rules(self):
        name = "tessera/data/x.cpp"
        for text, word in [("throw std::runtime_error(a);", "TS_CHECK"),
                           ("// caf\u00e9", "ASCII"),
                           ("x" * 81, "longer"),
                           ("// TODO tidy up", "TODO"),
                           ("y\n" * 300_000, "larger")]:
            self.assertIn(word, self.faults_of(name, text)[0])
        self.assertEqual(self.faults_of(name, "// TODO(#12) tidy up"), [])

    def test_a_using_that_nobody_uses(self):
        name = "tessera/data/x.cpp"
        text = "using detail::Json;\n"
        self.assertIn("not needed", self.faults_of(name, text)[0])
        self.assertEqual(self.faults_of(name, text + "Json json;\n"), [])

    def test_a_test_that_no_target_builds(self):
        self.assertIn("no target", self.faults_of("bench/x_test.cpp", "")[0])
        self.assertEqual(self.faults_of("tests/x_test.cpp", ""), [])

    def test_the_project_has_its_rooms(self):
        self.assertEqual(check_rooms.ROOMS[0], "core")
        self.assertEqual(check_rooms.ROOMS[-1], "train")


class CheckDocs(unittest.TestCase):
    def test_what_a_page_names_is_there(self):
        files = ["tessera/comm/x.h", "tessera/comm/y.cpp"]
        text = "`tessera/comm/x.h`, `comm/{x.h,y.cpp}`, `comm/`, `comm/*.h`, `run.json`, `a / b`, `comm/NAME.h`"
        self.assertEqual(list(check_docs.check_page(Path(), files, "p.md", text)), [])
        text = "`tessera/comm/z.h`, `comm/{x,z}.cpp`, [link](gone.md)\n```\n`tessera/none.h`\n```\n"
        found = list(check_docs.check_page(Path(), files, "p.md", text))
        self.assertEqual(len(found), 4, found)  # x.cpp too
        self.assertEqual(len(list(check_docs.check_page(Path(), ["a/x.md"], "p.md", "`a/README.md`"))), 1)

    def test_every_strategy_says_where_it_is_read(self):
        head = "| kind | keys | what a rank holds | when | read it here |\n| --- | --- | --- | --- | --- |\n"
        self.assertEqual(check_docs.check_strategies(f"{head}| a | b | c | d | `x/y.h` |\n\n"), [])
        self.assertEqual(len(check_docs.check_strategies(f"{head}| a | b | c | d | |\n\n")), 1)
        self.assertEqual(len(check_docs.check_strategies("| kind |")), 1)

    def test_every_figure_is_defined_once(self):
        page = "| name | unit | what it is |\n| --- | --- | --- |\n| `loss` | | x |\n| `old` | | x |\n\n"
        fields = '      {"loss", of<>},\n      {"lr", of<>},\n'
        found = list(check_docs.check_figures(page, fields, 'line.object("seconds", x)'))
        self.assertEqual([fault.split(": ")[1].split()[0] for fault in found], ["lr", "seconds", "old"])


class Lint(unittest.TestCase):
    def test_parts_with_findings_are_read_in_halves(self):
        def read(part):
            alike = {"b", "g"} <= set(part)  # names of one are names of the other
            return SimpleNamespace(returncode=int(alike or "d" in part), stdout="found", stderr="")

        with contextlib.redirect_stdout(io.StringIO()) as said:
            done = list(lint.read_in_parts([list("abcdefg"), ["x", "y"]], read))
        self.assertEqual([part for part, findings in done if findings], [["d"]])
        self.assertEqual(sorted(file for part, findings in done if not findings for file in part), sorted("abcefgxy"))
        self.assertIn(["x", "y"], [part for part, _ in done])
        self.assertEqual(said.getvalue(), "8 readings\n")

    def test_sources_of_a_room_with_the_same_options_are_read_as_one(self):
        def compiled(file, options):
            return {"command": f"c++ {options} -o {file}.o -c {file}"}

        names = [f"tessera/core/{i}.cpp" for i in range(lint.AT_ONCE + 1)]
        names += ["tessera/core/avx.cpp", "tessera/core/detail/x.cpp",
                  "tessera/data/x.cpp", "cli/x.cpp", "tessera/core/not_built.cpp"]
        files = [str(lint.ROOT / name) for name in names]
        known = {file: compiled(file, "-mavx" if "avx" in file else "-O2")
                 for file in files if "not_built" not in file}
        groups = list(lint.groups(files, known))
        self.assertEqual(sorted(map(len, groups)), [1, 1, 1, 1, 2, lint.AT_ONCE])
        self.assertEqual(sorted(sum(groups, [])), sorted(files))

    def test_sources_that_share_a_name_are_not_compiled_as_one(self):
        texts = {
            "a": "namespace x {\nnamespace {\nstruct Case {};\nusing Clock = Steady;\n}  // namespace\n}  // namespace x",
            "b": "namespace x {\nnamespace {\nvoid f(const\n       Case& c) {\n}\nusing Clock = Steady;\n"
                 "constexpr int kOne = 1, kTwo = 2;\n}  // namespace\nstruct Case {};\n}  // namespace x",
            "c": "namespace x {\nnamespace {\nenum class Case { kA };\n}  // namespace\n}  // namespace x",
            "d": "namespace y {\nnamespace {\nstruct Case {};\n}  // namespace\n}  // namespace y",
            "e": "namespace x {\nnamespace {\nint f;\nusing Clock = Other;\n}  // namespace\n}  // namespace x",
            "f": "namespace x {\nnamespace {\nint kTwo = 3;\n}  // namespace\n}  // namespace x\n#define F 1",
            "g": "#define F 2",
            "h": "namespace x {\nnamespace {\n[[noreturn]] void g() {\n}\nstd::function<void()> g2();\n}  // namespace\n}  // namespace x",
            "i": "namespace x {\nnamespace {\nvoid g(int i) {\n}\n}  // namespace\n}  // namespace x",
            "j": "namespace x {\nnamespace {\nusing A =\n    B;\nint g2;\n}  // namespace\n}  // namespace x",
            "k": "namespace x {\nnamespace {\nusing A =\n    C;\n}  // namespace\n}  // namespace x",
            "l": "int of_a_header = f2();",
            "m": "namespace x {\nnamespace {\nint f2(int i) {\n}\n}  // namespace\nint i = of.f3();\n}  // namespace x",
            "n": "namespace x {\nnamespace {\nint f3(int i) {\n}\n}  // namespace\n}  // namespace x"}
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                Path(folder, name).write_text(text)
            sources = [Path(folder, name) for name in texts]
            made = [[source.name for source in group] for group in lint.unity_groups.groups(sources)]
            self.assertEqual(made, [["a", "b", "d", "g", "h", "k", "l", "n"], ["c", "e", "f", "i", "j", "m"]])
            unity = Path(folder, "build/Unity/unity_0_cxx.cxx")
            unity.parent.mkdir(parents=True)
            unity.write_text("".join(f'#include "{source}"\n' for source in sources if source.name in {"a", "b", "d"}))
            Path(folder, "build/compile_commands.json").write_text(json.dumps([{"file": str(unity)}]))
            self.assertTrue(lint.unity_groups.holds(Path(folder, "build")))
            for text in (texts["c"], "int called = f<int>(1);"):
                Path(folder, "d").write_text(text)
                self.assertFalse(lint.unity_groups.holds(Path(folder, "build")))

    def test_a_verdict_is_of_a_source_its_headers_its_options_and_the_versions(self):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder).resolve()
            files = {"tessera/core/x.cpp": '#include "tessera/core/a.h"\n#include <vector>\n',
                     "tessera/core/a.h": '#include "tessera/core/b.h"\n', "tessera/core/b.h": "",
                     "tessera/core/other.h": "", "generated/made.h": "1", "tessera/core/b.inc": ""}
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            source = str(root / "tessera/core/x.cpp")

            def key(command="c++ -O2", versions="1"):
                compiled = {source: {"command": command}}
                return lint.Fingerprints(root, root / "generated", compiled, versions).of(source)

            known = [key()]
            (root / "tessera/core/other.h").write_text("int x;")
            self.assertEqual(key(), known[0])
            known += [key("c++ -O3"), key(versions="2")]
            (root / "tessera/core/b.h").write_text('#include "made.h"\n')
            known.append(key())
            (root / "generated/made.h").write_text("2")
            known.append(key())
            (root / source).write_text(files["tessera/core/x.cpp"] + "int y;")
            known.append(key())
            self.assertEqual(len(set(known)), 6)
            # And no matter of where the checkout lies.
            elsewhere = Path(shutil.copytree(root, root / "elsewhere", ignore=shutil.ignore_patterns("elsewhere")))
            moved = str(elsewhere / "tessera/core/x.cpp")
            self.assertEqual(key(f"c++ {source}"), lint.Fingerprints(
                elsewhere, elsewhere / "generated", {moved: {"command": f"c++ {moved}"}}, "1").of(moved))

    def test_what_passed_is_known_in_every_checkout_the_newest_of_it(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(lint, "MOST_PASSED", 3):
            cache = Path(folder, "deep", "passed.json")
            self.assertEqual(lint.known(cache), {})
            lint.note(cache, {"1": "a.cpp", "2": "b.cpp"})
            lint.note(cache, {"3": "a.cpp", "4": "b.cpp"})
            self.assertEqual(lint.known(cache), {"2": "b.cpp", "3": "a.cpp", "4": "b.cpp"})
            lint.note(cache, {"2": "b.cpp"})
            self.assertEqual(list(lint.known(cache)), ["3", "4", "2"])
            cache.write_text("{")
            self.assertEqual(lint.known(cache), {})


class SummarizeTests(unittest.TestCase):
    def summary(self, xml, steps="ok rooms\n", allowed="^needs a GPU"):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "a.xml").write_text(xml)
            Path(folder, "steps.txt").write_text(steps)
            Path(folder, "allowed").write_text(allowed)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                code = summarize_tests.main(folder, Path(folder, "allowed"))
            return code, out.getvalue().strip().split("\n")

    def test_sums_cases_and_steps(self):
        code, lines = self.summary(
            '<testsuites><testsuite><testcase name="a"/><testcase name="b"/>'
            "</testsuite></testsuites>")
        self.assertEqual((code, lines[-1]), (0, "3 passed, 0 failed"))

    def test_failures_count(self):
        code, lines = self.summary(
            '<s><testcase name="a" classname="X"><failure/></testcase></s>',
            steps="FAILED fast\n")
        self.assertEqual((code, lines[-1]), (1, "0 passed, 2 failed"))
        self.assertIn("failed: X.a", lines)

    def test_skips_need_an_allowed_reason(self):
        skip = '<s><testcase name="a"><skipped message="f:1\n{}"/></testcase></s>'
        code, lines = self.summary(skip.replace("\n", "&#10;").format("needs a GPU"))
        self.assertEqual((code, lines[-1]), (0, "1 passed, 0 failed"))
        code, lines = self.summary(skip.replace("\n", "&#10;").format("felt like it"))
        self.assertEqual((code, lines[-1]), (1, "1 passed, 1 failed"))

    def test_a_torn_file_is_a_failure(self):
        self.assertEqual(self.summary("<testsuites><tests")[0], 1)


class Quickstart(unittest.TestCase):
    def test_unigram_entropy(self):
        entropy = quickstart_summary.unigram_entropy
        self.assertAlmostEqual(entropy([1, 2, 3, 4] * 5), math.log(4))
        self.assertEqual(entropy([7, 7, 7]), 0.0)

    def test_chapters_lose_their_numbers(self):
        lines = ["Ge1:1 In the beginning\n", "Ge1:2 And the earth\n",
                 "Ge2:1 Thus\n"]
        self.assertEqual(quickstart_text.chapters(lines), [
            ("Ge1", "In the beginning\nAnd the earth\n\n"),
            ("Ge2", "Thus\n\n")])

    def test_no_text_is_in_both_files(self):
        many = [(str(i), f"text {i}\n") for i in range(400)]
        train, valid = quickstart_text.split(many)
        self.assertEqual(sorted(train + valid), sorted(t for _, t in many))
        self.assertTrue(0 < len(valid) < 40)
        few = [("one", "line\n" * 100)]
        train, valid = quickstart_text.split(few)
        self.assertEqual("".join(train) + "".join(valid), few[0][1])
        self.assertTrue(valid[0])
        for line in ["word " * 1000, "A title\n" + "word " * 1000]:
            train, valid = quickstart_text.split([("one line", line)])
            self.assertEqual(train[0] + valid[0], line)
            self.assertTrue(len(train[0]) > 10 * len(valid[0]) > 0)

    def test_of_a_long_file_the_beginning_is_taken(self):
        with tempfile.TemporaryDirectory() as folder, mock.patch.object(quickstart_text, "MOST", 100):
            for other in ("long.txt", "other.txt"):
                Path(folder, other).write_text("word " * 1000)
            [(_, text)] = quickstart_text.files(folder)
        self.assertEqual(text, "word " * 20 + "\n\n")


class Fuzz(unittest.TestCase):
    def test_what_does_not_end_is_a_fault(self):
        hang = subprocess.TimeoutExpired("verify", 600, output=b"rank 3")
        with mock.patch.object(subprocess, "run", side_effect=hang):
            self.assertEqual(fuzz.verify("tessera", "run.json"), "did not end within 600 s\nrank 3")


class Dev(unittest.TestCase):
    def test_help_lists_at_most_thirteen_verbs_and_each_has_a_script(self):
        root = Path(__file__).resolve().parents[2]
        text = (root / "dev").read_text()
        verbs = text.split('verbs="')[1].split('"')[0].split()
        self.assertLessEqual(len(verbs), 13)
        told = subprocess.run([root / "dev", "help"], check=True,
                              capture_output=True, text=True).stdout
        for verb in verbs:
            self.assertTrue((root / "scripts" / f"{verb}.sh").is_file(), verb)
            self.assertIn(f"\n  {verb} ", told)


if __name__ == "__main__":
    unittest.main()
