"""Programs that start other programs: their options, and where the command that they start begins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.bash.records import Word


@dataclass(frozen=True)
class LauncherForm:
    """How the command line of a launcher is read.

    name: of the launcher, as messages have it.
    switches: options without a value; all others take a value, either behind ``=`` or as the next word.
    pairs: options that take two words.
    before: words in front of the command: the image of a container, a host.
    short: what its options of a single letter are called.
    dashes: whether the command begins behind ``--``, and not at the first word that is no option.
    joined: whether the command is a text for another shell, as ssh's is.
    assigns: whether ``NAME=value`` may stand in front of the command.
    """

    name: str
    switches: frozenset[str] = frozenset()
    pairs: frozenset[str] = frozenset()
    before: int = 0
    short: Mapping[str, str] | None = None
    dashes: bool = False
    joined: bool = False
    assigns: bool = False


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


TORCHRUN = LauncherForm("torchrun", _set("standalone no_python m module run_path use_env"))
"""Source: pytorch/pytorch, torch/distributed/run.py, get_args_parser."""

SLURM = _set(
    "l label u unbuffered exclusive overlap no_kill k v verbose Q quiet E preserve_env s oversubscribe O overcommit"
    " container_mount_home no_container_mount_home container_writable container_readonly container_remap_root"
    " no_container_remap_root no_container_entrypoint container_entrypoint contiguous spread_job parsable H hold"
    " requeue no_requeue X disable_status Z no_allocate pty exact multi_prog"
)
"""Source: SchedMD/slurm, doc/man/man1/srun.1; NVIDIA/pyxis for the options of containers."""

SLURM_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus", "c": "cpus_per_task", "J": "job_name", "p": "partition"}

DOCKER = _set("rm it ti i t d interactive tty detach privileged init P publish_all read_only no_healthcheck q quiet")
"""Source: docker/cli, docs/reference/commandline/container_run.md."""

SINGULARITY = _set(
    "nv rocm containall contain cleanenv e C c i writable writable_tmpfs no_home fakeroot f root rw r w mount_home q"
    " quiet"
)
"""Source: apptainer/apptainer, cmd/internal/cli/action_flags.go; NVIDIA/enroot, doc/cmd/start.md."""

MPI_SHORT = {"n": "np", "c": "np"}

FORMS: Mapping[str, LauncherForm] = {
    "torchrun": TORCHRUN,
    "srun": LauncherForm("srun", SLURM, short=SLURM_SHORT),
    "salloc": LauncherForm("salloc", SLURM, short=SLURM_SHORT),
    "mpirun": LauncherForm(
        "mpirun",
        _set(
            "allow_run_as_root oversubscribe report_bindings tag_output v q display_map nooversubscribe bynode l"
            " prepend_rank"
            " use_hwthread_cpus genvall merge_stderr_to_stdout"
        ),
        pairs=_set("mca gmca genv env prtemca pmixmca"),
        short=MPI_SHORT,
    ),
    "deepspeed": LauncherForm(
        "deepspeed",
        _set(
            "module m no_python no_local_rank no_ssh no_ssh_check force_multi save_pid quiet bind_cores_to_rank"
            " elastic_training"
        ),
    ),
    "nohup": LauncherForm("nohup"),
    "time": LauncherForm("time", _set("p v")),
    "env": LauncherForm("env", _set("i ignore_environment"), assigns=True),
    "sudo": LauncherForm("sudo", _set("E H n S b i"), assigns=True),
    "numactl": LauncherForm("numactl", _set("l localalloc s show")),
    "timeout": LauncherForm("timeout", _set("foreground preserve_status v verbose"), before=1),
    "taskset": LauncherForm("taskset", _set("a"), before=1),
    "nice": LauncherForm("nice"),
    "ionice": LauncherForm("ionice"),
    "stdbuf": LauncherForm("stdbuf"),
    "setsid": LauncherForm("setsid", _set("w f c")),
    "unbuffer": LauncherForm("unbuffer"),
    "command": LauncherForm("command"),
    "exec": LauncherForm("exec", _set("c l")),
    "docker run": LauncherForm("docker", DOCKER, before=1),
    "docker exec": LauncherForm("docker", DOCKER, before=1),
    "podman run": LauncherForm("podman", DOCKER, before=1),
    "podman exec": LauncherForm("podman", DOCKER, before=1),
    "nvidia-docker run": LauncherForm("docker", DOCKER, before=1),
    "singularity exec": LauncherForm("singularity", SINGULARITY, before=1),
    "singularity run": LauncherForm("singularity", SINGULARITY, before=1),
    "apptainer exec": LauncherForm("apptainer", SINGULARITY, before=1),
    "apptainer run": LauncherForm("apptainer", SINGULARITY, before=1),
    "enroot start": LauncherForm("enroot", SINGULARITY, before=1),
    "ssh": LauncherForm("ssh", _set("n q t T tt f v x X A a C N 4 6"), before=1, joined=True),
    "pdsh": LauncherForm("pdsh", _set("S N"), joined=True),
    "clush": LauncherForm("clush", _set("a L b B"), joined=True),
    "kubectl exec": LauncherForm("kubectl", dashes=True),
    "ray job submit": LauncherForm("ray job submit", dashes=True),
    "ray submit": LauncherForm("ray submit", before=1),
    "nsys profile": LauncherForm("nsys profile"),
    "nsys launch": LauncherForm("nsys launch"),
    "ncu": LauncherForm("ncu"),
    "uv run": LauncherForm(
        "uv run", _set("active frozen no_sync locked isolated no_project no_dev all_extras m module q")
    ),
    "poetry run": LauncherForm("poetry run"),
    "pipenv run": LauncherForm("pipenv run"),
    "pixi run": LauncherForm("pixi run", _set("frozen locked")),
    "conda run": LauncherForm("conda run", _set("no_capture_output live_stream v")),
    "micromamba run": LauncherForm("micromamba run"),
    "accelerate launch": LauncherForm(
        "accelerate launch",
        _set(
            "cpu multi_gpu tpu ipex quiet no_python m module use_deepspeed use_fsdp use_megatron_lm use_xpu debug"
            " use_mps_device dynamo_use_fullgraph dynamo_use_dynamic tpu_use_cluster same_network enable_cpu_affinity"
            " use_parallelism_config standalone"
        ),
    ),
    "colossalai run": LauncherForm("colossalai run"),
    "horovodrun": LauncherForm("horovodrun", short={"n": "np"}),
    "composer": LauncherForm("composer", _set("module_mode command_mode m c verbose v")),
    "python -m torch.distributed.run": LauncherForm("python -m torch.distributed.run", TORCHRUN.switches),
    "python -m torch.distributed.launch": LauncherForm("python -m torch.distributed.launch", TORCHRUN.switches),
    "python -m accelerate.commands.launch": LauncherForm("accelerate launch"),
    "python -m deepspeed.launcher.runner": LauncherForm("deepspeed"),
    "python -m deepspeed.launcher.launch": LauncherForm("deepspeed"),
}
"""Launchers by the words that begin their command."""

SAME = {
    "ft_launcher": "torchrun",
    "mpiexec": "mpirun",
    "orterun": "mpirun",
    "prun": "mpirun",
    "nvidia-docker exec": "docker exec",
    "oc exec": "kubectl exec",
    "python -m torch.distributed.elastic_run": "python -m torch.distributed.run",
    "python -m accelerate.commands.accelerate_cli launch": "accelerate launch",
    "accelerate-launch": "accelerate launch",
    "deepspeed.pt": "deepspeed",
}

INTERPRETERS = re.compile(r"(python|pypy|ipython|pdb)[\d.]*w?$")
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")


@dataclass(frozen=True)
class SplitCommand:
    """The command line of a launcher, divided.

    form: of the launcher.
    options: (name, words of its value) in the order of the command line.
    assigned: variables in front of the command.
    rest: the command that it starts.
    is_module: whether the command is the name of a Python module.
    """

    form: LauncherForm
    options: Sequence[tuple[Word, str, Sequence[Word]]]
    assigned: Mapping[str, Word]
    rest: Sequence[Word]
    is_module: bool


def find_form(words: Sequence[Word]) -> tuple[LauncherForm, int] | None:
    """Returns the launcher that a command begins with, and how many words name it; None if it is none."""
    names = [words[0].text.rpartition("/")[2], *(word.text for word in words[1:4])]
    count = 1
    if INTERPRETERS.match(names[0]):
        module = find_module(words)
        if not module:
            return None
        names = [f"python -m {words[module].text}", *(word.text for word in words[module + 1 : module + 3])]
        count = module + 1
    for length in (3, 2, 1):
        name = " ".join(names[:length])
        name = SAME.get(name, name)
        if name in FORMS and len(names) >= length:
            return FORMS[name], count + length - 1
    return None


def is_unset(word: Word) -> bool:
    """Returns whether a word is nothing but a variable that nothing sets."""
    return bool(word.unknown) and re.fullmatch(r"\$\{?[\w@*]+(\[[@*]\])?\}?", word.text) is not None


def find_module(words: Sequence[Word]) -> int:
    """Returns the place of the module behind ``python -m``; 0 without."""
    for place, word in enumerate(words[1:], 1):
        if word.text == "-m" and place + 1 < len(words):
            return place + 1
        if not word.text.startswith("-") or word.text == "-":
            return 0
    return 0


def split_command(words: Sequence[Word]) -> SplitCommand | None:
    """Returns the command line of a launcher with its parts; None for any other command."""
    begin = find_form(words)
    if begin is None:
        return None
    form, place = begin
    options: list[tuple[Word, str, Sequence[Word]]] = []
    assigned: dict[str, Word] = {}
    before, is_module = form.before, False
    while place < len(words):
        text = words[place].text
        if is_unset(words[place]):  # bash drops it
            place += 1
            continue
        if text == "--":
            place += 1
            if form.dashes or not before:
                break
            continue
        option = re.match(r"--?([A-Za-z0-9][\w.-]*)(?:=(.*))?$", text, re.DOTALL)
        if option is not None:
            name, value = _read_option(form, words, place, option)
            is_module = is_module or (name in ("m", "module") and name in form.switches)
            options.append((words[place], (form.short or {}).get(name, name), value))
            place += 1 + (len(value) if option[2] is None else 0)
        elif form.assigns and (assignment := re.match(r"([A-Za-z_]\w*)=", text)):
            assigned[assignment[1]] = _drop_front(words[place], assignment.end())
            place += 1
        elif form.dashes or before:
            before -= not form.dashes
            place += 1
        else:
            break
    return SplitCommand(form, options, assigned, words[place:], is_module)


def _read_option(
    form: LauncherForm, words: Sequence[Word], place: int, option: re.Match[str]
) -> tuple[str, Sequence[Word]]:
    """Returns the name of an option and the words of its value."""
    name = option[1].replace("-", "_")
    if option[2] is not None:
        return name, [_drop_front(words[place], option.start(2))]
    return name, words[place + 1 : place + 1 + _count_values(form, words, place, name)]


def _count_values(form: LauncherForm, words: Sequence[Word], place: int, name: str) -> int:
    """Returns how many words behind an option are its value."""
    if name in form.switches or place + 1 >= len(words):
        return 0
    if name in form.pairs:
        return 1 if "=" in words[place + 1].text else 2
    compact = form.switches and not words[place].text.startswith("--") and set(name) <= form.switches
    after = words[place + 1].text
    return 0 if compact or (after.startswith("-") and not re.fullmatch(r"-\d+", after)) else 1


def _drop_front(word: Word, start: int) -> Word:
    return Word(word.text[start:], word.line, word.unknown, word.file)
