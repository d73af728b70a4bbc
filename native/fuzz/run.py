"""Builds the frame reader with sanitizers and fuzzes it: `python native/fuzz/run.py --seconds 60`.

The corpus starts with the golden frames. It stays in build/fuzz, so that later runs continue with it.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from thinwire.tools.options import LINE_EVERY
from thinwire.tools.progress import WorkProgress, lines_every

ROOT = Path(__file__).parents[2]
SOURCES = [
    *("reading.cpp", "reader.cpp", "gaps.cpp", "values.cpp", "unary.cpp", "crc32c.cpp"),
    *("sum.cpp", "shard_reader.cpp", "fuzz/decode_fuzzer.cpp"),
]
FLAGS = ["-std=c++20", "-g", "-O1", "-ffp-contract=off", "-fsanitize=fuzzer,address,undefined"]
# The tensor sizes of the receivers in decode_fuzzer.cpp; each golden frame fits one of them.
RECEIVERS = [[3000, 21], [3000], [700, 1300, 1000000, 0], [2], [2049]]


class ToolError(Exception):
    """The fuzzer cannot be built here."""


def build(into: Path) -> Path:
    """Compile the fuzzer and return its path; ToolError if clang or its libFuzzer is not installed."""
    compiler = shutil.which("clang++")
    if compiler is None:
        raise ToolError("clang++ is not installed; on Debian: apt-get install clang libclang-rt-dev")
    into.mkdir(parents=True, exist_ok=True)
    target = into / "decode_fuzzer"
    sources = [str(ROOT / "native" / name) for name in SOURCES]
    done = subprocess.run(
        [compiler, *FLAGS, "-fno-sanitize-recover=all", *sources, "-o", str(target)], capture_output=True, text=True
    )
    if done.returncode != 0 and re.search(r"libclang_rt\.\w+.* (No such file|not found)|cannot find", done.stderr):
        raise ToolError("clang++ has no libFuzzer; on Debian: apt-get install libclang-rt-14-dev")
    if done.returncode != 0:
        raise SystemExit(f"the fuzzer does not compile:\n{done.stderr}")
    return target


def seed(corpus: Path) -> None:
    """Write the golden frames to the corpus, each once unchanged and once in the mode that repairs the checksum."""
    corpus.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "tests" / "codec" / "golden").glob("*.frame")):
        numels = json.loads(path.with_suffix(".json").read_text())["numels"]
        for mode in (0, 2):
            choice = bytes([RECEIVERS.index(numels) << 3 | mode])
            (corpus / f"{path.stem}-{mode}").write_bytes(choice + path.read_bytes())


def fuzz(target: Path, corpus: Path, seconds: int) -> tuple[int, str]:
    """Run the fuzzer for some seconds and return its exit code and report."""
    command = [str(target), str(corpus), f"-max_total_time={seconds}", "-max_len=4096", "-print_final_stats=1"]
    command += ["-rss_limit_mb=2048", "-timeout=10", f"-artifact_prefix={target.parent}/"]
    began = time.monotonic()

    def sentence() -> str:
        return f"fuzzing: {time.monotonic() - began:.0f} of {seconds} s"

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with lines_every(LINE_EVERY, sentence, Console()), process:
        assert process.stdout is not None
        lines: list[str] = []
        try:
            for line in process.stdout:
                lines.append(line.rstrip())
                if line.startswith("#") and ("pulse" in line or "INITED" in line):
                    print(line.rstrip(), flush=True)
        except KeyboardInterrupt:
            process.terminate()
            print("stopped.", file=sys.stderr)
            return 130, ""
    return process.returncode, "\n".join(lines)


def summary(report: str) -> str:
    """Return executions and coverage in one line."""
    executions = re.search(r"number_of_executed_units:\s*(\d+)", report)
    coverage = re.findall(r"cov: (\d+) ft: (\d+)", report)
    edges, features = coverage[-1] if coverage else ("?", "?")
    return f"{executions.group(1) if executions else '?'} executions, {edges} edges and {features} features covered"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=int, default=60, help="how long to run (default: 60)")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "fuzz", help="where the fuzzer and corpus live")
    arguments = parser.parse_args()
    if arguments.seconds < 1:
        parser.error("--seconds must be at least 1")
    try:
        with WorkProgress("compiling the fuzzer", console=Console(), announce=False):
            target = build(arguments.build)
    except ToolError as missing:
        print(f"fuzz: {missing}.", file=sys.stderr)
        return 2
    seed(arguments.build / "corpus")
    code, report = fuzz(target, arguments.build / "corpus", arguments.seconds)
    if code != 0:
        print("\n".join(report.splitlines()[-60:]))
        return code
    print(summary(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
