"""Follows a shell script without running any of it: which commands it would run, with which words.

What nothing sets stays in the words as it is written, and its name beside it. Tests of what nobody knows (a file, what
a program prints) do not hold, and what then may have been missed is noted. Everything has limits, so every script ends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshcast.simulator.formats.launch.bash.builtins import PRINTING
from meshcast.simulator.formats.launch.bash.conditions import UNKNOWN, Conditions, Status, judge
from meshcast.simulator.formats.launch.bash.declarations import Declarations
from meshcast.simulator.formats.launch.bash.directives import list_slurm_variables, read_directives
from meshcast.simulator.formats.launch.bash.doubts import find_asked, find_doubtful, hides_launch
from meshcast.simulator.formats.launch.bash.expansion import Expander, group_nodes
from meshcast.simulator.formats.launch.bash.files import read_file, resolve
from meshcast.simulator.formats.launch.bash.grammar import Source, field_of, find_errors, parse
from meshcast.simulator.formats.launch.bash.patterns import matches
from meshcast.simulator.formats.launch.bash.records import Command, LostPlace, ScriptRun, Word
from meshcast.simulator.formats.launch.bash.state import (
    MAX_ROUNDS,
    CapturedOutput,
    Frame,
    Shell,
    StepLimits,
    Variable,
)
from meshcast.simulator.formats.launch.bash.values import (
    Segment,
    Value,
    as_word,
    from_word,
    is_resolved,
    name_unknown,
    read_as_bash,
    read_text,
)

if TYPE_CHECKING:
    from tree_sitter import Node

__all__ = ["Command", "LostPlace", "ScriptRun", "Word", "run_script", "run_text"]


class _ExitShell(Exception):
    """The script, or a subshell, ends."""


class _ReturnFromFunction(Exception):
    """A function, or a sourced file, ends, and how."""

    def __init__(self, status: Status) -> None:
        self.status = status


class _LeaveLoop(Exception):
    """A loop ends, or its round does."""

    def __init__(self, levels: int, goes_on: bool) -> None:
        self.levels, self.goes_on = levels, goes_on


class Interpreter:
    """Follows the statements of a script."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.expander = Expander(shell, self.capture)
        self.conditions = Conditions(shell, self.expander)
        self.declarations = Declarations(shell, self.expander)
        self.unsure = 0
        self.statements: Mapping[str, Callable[[Source, Node], Status]] = {
            "command": self._command,
            "variable_assignment": self.declarations.assign,
            "variable_assignments": self._sequence,
            "declaration_command": self.declarations.declare,
            "unset_command": self.declarations.unset,
            "redirected_statement": self._redirect,
            "pipeline": self._pipeline,
            "list": self._list,
            "if_statement": self._if,
            "case_statement": self._case,
            "for_statement": self._for,
            "c_style_for_statement": self._count,
            "while_statement": self._while,
            "function_definition": self._define,
            "subshell": self._subshell,
            "negated_command": self._negate,
            "test_command": self.conditions.evaluate,
            "compound_statement": self._compound,
        }

    # ------------------------------------------------------------------------------------------------------ statements

    def run(self, source: Source, node: Node) -> Status:
        """Follows a statement. Returns how it ends."""
        limits = self.shell.limits
        limits.step(source.line_of(node))
        limits.enter()
        status = self.statements.get(node.type, self._sequence)(source, node)
        limits.leave()
        return status

    def run_source(self, source: Source) -> Status:
        """Follows a text, and notes where it is not of bash's grammar."""
        self.shell.lost += find_errors(source)
        return self.run(source, source.root)

    def _sequence(self, source: Source, node: Node) -> Status:
        return self._run_all(source, node.children)

    def _run_all(self, source: Source, nodes: Sequence[Node]) -> Status:
        status = Status()
        for child in nodes:
            if child.type in self.statements or child.type in ("ERROR", "do_group", "program", "else_clause"):
                status = self.run(source, child)
        return status

    def _compound(self, source: Source, node: Node) -> Status:
        if node.children[0].type != "((":
            return self._sequence(source, node)
        return self._judge_number(source, node, node.children[0].end_byte, node.children[-1].start_byte)

    def _judge_number(self, source: Source, node: Node, start: int, end: int) -> Status:
        number, unknown = self.expander.compute(source, node, start, end)
        if number is None:
            return UNKNOWN if unknown else Status(holds=False)
        return Status(number != 0)

    def _negate(self, source: Source, node: Node) -> Status:
        return self.run(source, node.children[-1]).negate()

    def _list(self, source: Source, node: Node) -> Status:
        """Follows ``a && b || c``, whose tree leans to the left."""
        chain: list[tuple[str, Node]] = []
        while node.type == "list" and node.child_count > 2:
            chain.append((node.children[1].type, node.children[-1]))
            node = node.children[0]
        status = self.run(source, node)
        for sign, right in reversed(chain):
            if not status.resolved and status is UNKNOWN:
                self._doubt(source, right, source.text(node))
            if status.holds == (sign == "&&"):
                with self._branch(status):
                    status = self.run(source, right)
        return status

    def _pipeline(self, source: Source, node: Node) -> Status:
        parts = [child for child in node.children if child.is_named and child.type != "comment"]
        status, before, outer = Status(), self.shell.stdin, self.shell.output
        for place, part in enumerate(parts):
            last = place == len(parts) - 1
            output = CapturedOutput()
            self.shell.output = outer if last else output
            with self._restored_variables():
                status = self.run(source, part)
            self.shell.stdin = None if output.is_opaque else output.read()
        self.shell.stdin, self.shell.output = before, outer
        return status

    def _subshell(self, source: Source, node: Node) -> Status:
        with self._restored_variables():
            return self._sequence(source, node)

    @contextmanager
    def _restored_variables(self) -> Iterator[None]:
        """Follows a part in a subshell, which may exit, and whose variables are gone behind it."""
        shell = self.shell
        variables, functions, frames = shell.variables, shell.functions, shell.frames
        shell.limits.spend(len(variables))
        shell.variables, shell.functions = dict(variables), dict(functions)
        shell.frames = [*frames[:-1], replace(frames[-1], arguments=list(frames[-1].arguments))]
        depth = shell.limits.depth
        try:
            yield
        except _ExitShell:
            shell.limits.depth = depth
        finally:
            shell.variables, shell.functions, shell.frames = variables, functions, frames

    def capture(self, source: Source, node: Node) -> Value | None:
        """Returns what the statements of a command substitution print; None if that is not known."""
        shell, outer = self.shell, self.shell.output
        shell.output = output = CapturedOutput()
        with self._restored_variables():
            self._sequence(source, node)
        shell.output = outer
        return None if output.is_opaque else output.read()

    # -------------------------------------------------------------------------------------------------------- branches

    @contextmanager
    def _branch(self, status: Status) -> Iterator[None]:
        """Follows a branch that may not be taken if variables were set: an exit in it does not end the script."""
        self.unsure += not status.sure
        try:
            yield
        finally:
            self.unsure -= not status.sure

    def _if(self, source: Source, node: Node) -> Status:
        """Follows the branch of ``if`` whose test holds; a branch whose test is not known is not taken."""
        children = [child for child in node.children if child.type != "comment"]
        then = next((place for place, child in enumerate(children) if child.type == "then"), len(children))
        tests, body = children[1:then], children[then + 1 :]
        clauses = [child for child in body if child.type in ("elif_clause", "else_clause")]
        status = self._run_all(source, tests)
        unresolved = not status.resolved
        taken = Status()
        if status.holds and status.resolved:
            with self._branch(status):
                taken = self._run_all(source, [child for child in body if child not in clauses])
        else:
            for clause in clauses:
                if clause.type == "else_clause":
                    with self._branch(status):
                        taken = self._sequence(source, clause)
                    break
                then = next((i for i, child in enumerate(clause.children) if child.type == "then"), clause.child_count)
                other = self._run_all(source, clause.children[:then])
                status = status.join(other, other.holds)
                unresolved = unresolved or not other.resolved
                if other.holds and other.resolved:
                    with self._branch(status):
                        taken = self._run_all(source, clause.children[then:])
                    break
        if unresolved:
            self._doubt(source, node, " ".join(source.text(test) for test in tests))
        return Status(taken.holds)

    def _case(self, source: Source, node: Node) -> Status:
        subject = self.expander.text(source, field_of(node, "value"))
        known = is_resolved(subject)
        sure = known and not any(segment.unset for segment in subject)
        status = Status()
        for item in node.children:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            texts = [read_as_bash(self.expander.pattern(source, pattern)) for pattern in patterns]
            default = "*" in texts
            if default if not known else any(matches(read_as_bash(subject), text) for text in texts):
                with self._branch(Status(sure=sure)):
                    status = self._run_all(source, [child for child in item.children if child not in patterns])
                break
        if not known:
            self._doubt(source, node, source.text(field_of(node, "value")))
        return status

    def _doubt(self, source: Source, node: Node, test: str) -> None:
        """Notes what depends on a test that nobody knows: variables that a branch sets, and a launch in a branch."""
        line = source.line_of(node)
        unknown = tuple(name for name in find_asked(source, test) if not self._is_known(name))
        for name in find_doubtful(source, node):
            variable = self.shell.variables.get(name, Variable())
            why = f"what {name} holds depends on a test that is not known"
            self.shell.variables[name] = replace(variable, lost=(*variable.lost, LostPlace(line, why, unknown)))
        if hides_launch(source.text(node)):
            self.shell.lost.append(
                LostPlace(line, "which command is started depends on a test that is not known", unknown)
            )

    def _is_known(self, name: str) -> bool:
        variable = self.shell.variables.get(name)
        return variable is not None and all(is_resolved(value) for value in variable.elements.values())

    # ----------------------------------------------------------------------------------------------------------- loops

    def _for(self, source: Source, node: Node) -> Status:
        """Follows ``for`` over words; over words that are not known, once."""
        name, body = source.text(field_of(node, "variable")), field_of(node, "body")
        words = node.children_by_field_name("value")
        values = [value for group in group_nodes(source, words) for value in self.expander.fields(source, *group)]
        if not any(child.type == "in" for child in node.children):
            values = list(self.shell.frame.arguments)
        status = Status()
        for rounds, value in enumerate(values):
            self._check_rounds(source, node, rounds)
            self.shell.assign_text(name, value)
            if self._round(source, body):
                break
        return status

    def _count(self, source: Source, node: Node) -> Status:
        """Follows ``for ((i = 0; i < 8; i++))``."""
        start = source.content.find(b"((", node.start_byte) + 2
        body = field_of(node, "body")
        close = next(child.start_byte for child in node.children if child.type == "))")
        ends = [child.start_byte for child in node.children if child.type == ";" and child.end_byte <= close]
        if len(ends) < 2:
            return self._sequence(source, node)
        self.expander.compute(source, node, start, ends[0])
        rounds = 0
        while self._goes_on(source, node, ends):
            self._check_rounds(source, node, rounds)
            rounds += 1
            if self._round(source, body):
                break
            if self.expander.compute(source, node, ends[1] + 1, close)[0] is None:
                break
        return Status()

    def _goes_on(self, source: Source, node: Node, ends: list[int]) -> bool:
        number, _ = self.expander.compute(source, node, ends[0] + 1, ends[1])
        return bool(number) or not source.text_of(ends[0] + 1, ends[1]).strip()

    def _while(self, source: Source, node: Node) -> Status:
        """Follows ``while`` and ``until`` until the test fails, is not known, or a round changes nothing."""
        body = field_of(node, "body")
        tests = [child for child in node.children[1:] if child != body]
        until = node.children[0].type == "until"
        rounds = 0
        while True:
            before = dict(self.shell.variables), list(self.shell.frame.arguments), self.shell.stdin
            self.shell.limits.spend(len(self.shell.variables))
            status = self._run_all(source, tests)
            if not status.resolved or status.holds == until:
                break
            self._check_rounds(source, node, rounds)
            rounds += 1
            if self._round(source, body):
                break
            after = self.shell.variables, self.shell.frame.arguments, self.shell.stdin
            if before == after and body.child_count:
                break
        return Status()

    def _check_rounds(self, source: Source, node: Node, rounds: int) -> None:
        if rounds >= MAX_ROUNDS:
            self.shell.limits.line = source.line_of(node)
            raise self.shell.limits.refuse(f"a loop has more than {MAX_ROUNDS:,} rounds")

    def _round(self, source: Source, body: Node) -> bool:
        """Follows a round of a loop. Returns whether the loop ends behind it."""
        depth = self.shell.limits.depth
        try:
            self.run(source, body)
        except _LeaveLoop as leaving:
            self.shell.limits.depth = depth
            if leaving.levels > 1:
                raise _LeaveLoop(leaving.levels - 1, leaving.goes_on) from None
            return not leaving.goes_on
        return False

    # ---------------------------------------------------------------------------------------------------- redirections

    def _redirect(self, source: Source, node: Node) -> Status:
        """Follows a statement with its here-document and the file that it writes."""
        body = node.child_by_field_name("body")
        redirects = node.children_by_field_name("redirect")
        behind = [child for redirect in redirects for child in redirect.children if redirect.type == "heredoc_redirect"]
        redirects = [*redirects, *(child for child in behind if child.type == "file_redirect")]
        outer, before = self.shell.output, self.shell.stdin
        self._read_redirects(source, redirects)
        target, append = self._find_target(source, redirects)
        pipe = next((child for child in behind if child.type == "pipeline"), None)
        self.shell.output = output = CapturedOutput() if target or pipe is not None else outer
        status = self.run(source, body) if body is not None else Status()
        self.shell.output, self.shell.stdin = outer, before
        printed = output.read() if output is not None and not output.is_opaque else None
        if target and printed is not None and target != "/dev/null":
            self.shell.write_file(target, printed, append)
        if pipe is not None:
            self.shell.stdin = printed
            status = self._pipeline(source, pipe)
            self.shell.stdin = before
        for child in behind:
            status = self.run(source, child) if child.type in self.statements and child is not pipe else status
        return status

    def _read_redirects(self, source: Source, redirects: Sequence[Node]) -> None:
        """Sets what a command reads: a here-document, a here-string, or a file."""
        for redirect in redirects:
            if redirect.type == "heredoc_redirect":
                self.shell.stdin = self._heredoc(source, redirect)
            elif redirect.type == "herestring_redirect":
                text = self.expander.text(source, redirect.children[-1])
                self.shell.stdin = (*text, Segment("\n", source.line_of(redirect)))
            elif redirect.type == "file_redirect" and any(child.type == "<" for child in redirect.children):
                name = self.expander.text(source, redirect.children[-1])
                content = read_file(self.shell, read_as_bash(name)) if not name_unknown(name) else None
                self.shell.stdin = None if content is None else (Segment(content, source.line_of(redirect)),)

    def _heredoc(self, source: Source, redirect: Node) -> Value:
        parts = {child.type: child for child in redirect.children}
        body, label = parts["heredoc_body"], parts["heredoc_start"]
        start = source.content.rfind(b"\n", 0, body.start_byte) + 1
        end = source.content.rfind(b"\n", 0, body.end_byte) + 1 or body.end_byte
        if source.text(label)[:1] in ("'", '"', "\\"):
            value = self.expander.literal(source, start, end, "raw")
        else:
            value = self.expander.join(self.expander.expand_span(source, body, start, end, quoted=True))
        if redirect.children[0].type == "<<-":
            value = tuple(replace(segment, text=re.sub(r"(?m)^\t+", "", segment.text)) for segment in value)
        return value

    def _find_target(self, source: Source, redirects: Sequence[Node]) -> tuple[str, bool]:
        """Returns the file that a command writes, and whether at its end; "" without."""
        for redirect in redirects:
            signs = [child.type for child in redirect.children if not child.is_named]
            descriptor = redirect.child_by_field_name("descriptor")
            if redirect.type != "file_redirect" or (descriptor is not None and source.text(descriptor) != "1"):
                continue
            if any(sign in (">", ">>", ">|", "&>", "&>>") for sign in signs):
                name = read_text(self.expander.text(source, redirect.children[-1]))
                return name, any(sign in (">>", "&>>") for sign in signs)
        return "", False

    # -------------------------------------------------------------------------------------------------------- commands

    def _define(self, source: Source, node: Node) -> Status:
        self.shell.functions[source.text(field_of(node, "name"))] = (source, field_of(node, "body"))
        return Status()

    def _command(self, source: Source, node: Node) -> Status:
        """Follows a simple command: assignments in front of it, its words, what it is."""
        self.expander.lost = []
        line, before = source.line_of(node), self.shell.stdin
        assignments: list[Node] = []
        parts: list[Node] = []
        redirected = False
        end = -1  # of an assignment, with what the grammar takes for other words
        for child in node.children:
            if assignments and re.search(r"(?<!\\)\n", source.text_of(end, source.start_of(child))):
                # lines above with several assignments, which the grammar takes for parts of this command
                for assignment in assignments:
                    self.declarations.assign(source, assignment)
                assignments = []
            if child.type == "variable_assignment" or source.start_of(child) == end:
                end = child.end_byte
                assignments += [child] if child.type == "variable_assignment" else []
            elif child.type == "command_name":
                parts += child.children
            elif child.type.endswith("_redirect"):
                self._read_redirects(source, [child])
                redirected = True
            elif child.type != "comment":
                parts.append(child)
        values = [value for group in group_nodes(source, parts) for value in self.expander.fields(source, *group)]
        lost = tuple(dict.fromkeys(self.expander.lost))
        if not values:
            for assignment in assignments:
                self.declarations.assign(source, assignment)
            status = Status()
        else:
            assigned = dict(self.declarations.read(source, assignment) for assignment in assignments)
            status = self._start(values, line, assigned, lost, source.file_at(source.start_of(node)))
        if redirected:  # else what it read is read
            self.shell.stdin = before
        return status

    def _start(
        self,
        values: list[Value],
        line: int,
        assigned: Mapping[str, Value] = {},
        lost: tuple[LostPlace, ...] = (),
        file: str = "",
    ) -> Status:
        """Follows a function, or a command of the shell; notes any other. assigned: variables in front of it."""
        name, words = read_text(values[0]), values[1:]
        if name in self.shell.functions:
            return self._call(name, words)
        if name in _BUILTINS:
            before = {label: self.shell.variables.get(label) for label in assigned if name == "read"}
            for label in before:
                self.shell.assign_text(label, assigned[label])
            status = _BUILTINS[name](self, words)
            for label, variable in before.items():
                self.shell.restore(label, variable)
            return status
        if name in PRINTING:
            printed = PRINTING[name](self.shell, words)
            if printed is None:
                self.shell.print_opaque()
            else:
                self.shell.print(printed)
            return Status()
        if name == "tee":
            self._tee(words)
            return Status()
        environment = self.shell.exported_words()
        environment |= {label: as_word(value, line) for label, value in assigned.items()}
        self.shell.print_opaque()
        stdin = as_word(self.shell.stdin, line) if self.shell.stdin else None
        command = tuple(as_word(value, line) for value in values)
        if self._continue_command(command, line):
            return Status(resolved=False, sure=False)
        lost += _find_broken(command)
        self.shell.commands.append(Command(command, environment, line, lost, stdin, file))
        return Status(resolved=False, sure=False)

    def _continue_command(self, words: Sequence[Word], line: int) -> bool:
        """Adds words that begin with an argument to the command in front, which was meant to go on, and notes that
        there. Returns whether they are such words."""
        commands = self.shell.commands
        if not words[0].text.startswith("-") or not commands or commands[-1].words[0].text.startswith("-"):
            return False
        why = f"the command in front ends before {words[0].text}: a comment or a space behind \\ cuts it"
        cut = commands[-1]
        places = (
            cut.lost
            if any(place.why.startswith("the command in front ends") for place in cut.lost)
            else (*cut.lost, LostPlace(line, why))
        )
        commands[-1] = replace(cut, words=(*cut.words, *words), lost=places)
        return True

    def _tee(self, words: list[Value]) -> None:
        texts = [read_text(word) for word in words]
        names = [text for text in texts if not text.startswith("-")]
        if self.shell.stdin is None:
            self.shell.print_opaque()
            return
        for name in names:
            self.shell.write_file(name, self.shell.stdin, "-a" in texts)
        self.shell.print(self.shell.stdin)

    def _call(self, name: str, words: list[Value]) -> Status:
        """Follows a function."""
        source, body = self.shell.functions[name]
        frame, outer = Frame(words), self.shell.frames
        self.shell.frames = [*outer, frame]
        depth = self.shell.limits.depth
        try:
            return self.run(source, body)
        except _ReturnFromFunction as returning:
            self.shell.limits.depth = depth
            return returning.status
        finally:
            self.shell.frames = outer
            for variable_name, variable in frame.hidden.items():
                self.shell.restore(variable_name, variable)

    # -------------------------------------------------------------------------------------------- builtins of the shell

    def follow_file(self, words: list[Value]) -> Status:
        """Follows a file that is sourced, if it lies beside the script."""
        if not words or name_unknown(words[0]):
            return UNKNOWN
        path = read_text(words[0])
        text = read_file(self.shell, path)
        if text is None:
            return UNKNOWN
        source = parse(text.replace("\r\n", "\n"), self.shell.where, ((0, 1, path),))
        frame = self.shell.frame
        arguments, is_given = frame.arguments, frame.is_given
        if len(words) > 1:
            frame.arguments, frame.is_given = words[1:], True
        depth = self.shell.limits.depth
        try:
            return self.run_source(source)
        except _ReturnFromFunction as returning:
            self.shell.limits.depth = depth
            return returning.status
        finally:
            frame.arguments, frame.is_given = arguments, is_given

    def evaluate(self, words: list[Value]) -> Status:
        """Follows ``eval``: its words are a text of bash."""
        text, lines = [], []
        size = 0
        for index, value in enumerate(words):
            for segment in (Segment(" ", self.shell.limits.line),) * bool(index) + value:
                lines.append((size, segment.line, segment.file))
                text.append(segment.text)
                size += len(segment.text.encode("utf-8", "replace"))
        self.shell.limits.spend(size)
        source = parse("".join(text), f"{self.shell.where}:{self.shell.limits.line}", tuple(lines))
        return self.run_source(source)

    def shift(self, words: list[Value]) -> Status:
        """Drops arguments in front."""
        text = read_as_bash(words[0]) if words else "1"
        count = int(text) if re.fullmatch(r"\d{1,9}", text) else 1
        arguments = self.shell.frame.arguments
        if count > len(arguments):
            return Status(holds=False)
        self.shell.limits.spend(len(arguments))
        self.shell.frame.arguments = arguments[count:]
        return Status()

    def set_options(self, words: list[Value]) -> Status:
        """Sets the arguments: ``set -- a b``; options of the shell have no influence."""
        texts = [read_text(word) for word in words]
        if "--" in texts:
            self.shell.frame.arguments = words[texts.index("--") + 1 :]
            self.shell.frame.is_given = True
        return Status()

    def exit(self, words: list[Value]) -> Status:
        """Ends the script, except for an error or in a branch that would not be taken if variables were set."""
        code = read_as_bash(words[0]) if words else "0"
        if self.unsure or code not in ("0", ""):
            return Status(holds=False)
        raise _ExitShell

    def return_(self, words: list[Value]) -> Status:
        """Ends a function: with success, unless its word is another number than 0."""
        status = judge(not words or read_as_bash(words[0]) in ("0", ""), *words[:1])
        raise _ReturnFromFunction(replace(status, sure=status.sure and not self.unsure))

    def change_folder(self, words: list[Value]) -> Status:
        """Changes the folder from which paths start."""
        paths = [word for word in words if not read_text(word).startswith("-")]
        if paths and not name_unknown(paths[0]):
            self.shell.assign_text("PWD", (Segment(resolve(self.shell, read_text(paths[0])), self.shell.limits.line),))
        elif paths:
            self.shell.assign_text("PWD", paths[0])
        return Status()

    def leave_loop(self, words: list[Value], goes_on: bool) -> Status:
        """Ends a loop, or its round."""
        text = read_as_bash(words[0]) if words else "1"
        raise _LeaveLoop(int(text) if re.fullmatch(r"[1-9]\d?", text) else 1, goes_on)

    def read_line(self, words: list[Value]) -> Status:
        """Reads a line of what the command gets, into variables; what nobody knows leaves them unset."""
        names = [read_text(word) for word in words if re.fullmatch(r"[A-Za-z_]\w*", read_text(word))]
        stdin = self.shell.stdin
        if stdin is None or name_unknown(stdin):
            for name in names:
                self.shell.variables.pop(name, None)
            return UNKNOWN
        text = read_as_bash(stdin)
        first, _, rest = text.partition("\n")
        self.shell.limits.spend(len(text))
        self.shell.stdin = (replace(stdin[0], text=rest),) if rest else ()
        parts = self._split_line(first, max(0, len(names) - 1))
        for place, name in enumerate(names):
            part = parts[place] if place < len(parts) else ""
            self.shell.assign_text(name, (Segment(part, self.shell.limits.line),))
        return Status(holds=bool(text))

    def _split_line(self, line: str, most: int) -> list[str]:
        """Returns the parts of a line, divided at most so often: at the signs of IFS, at spaces without."""
        variable = self.shell.variables.get("IFS")
        value = variable.elements.get(0, ()) if variable is not None else None
        signs = None if value is None or name_unknown(value) else read_as_bash(value)
        if signs is None or signs.strip() == "" != signs:
            return [part.strip() for part in line.split(None, most)]
        line = line.strip() if " " in signs else line
        return re.split(f"[{re.escape(signs)}]", line, maxsplit=most) if most and signs else [line]

    def let(self, words: list[Value]) -> Status:
        """Computes formulas."""
        number: int | None = 0
        for word in words:
            number = self.expander.calculate(read_as_bash(word))[0] if not name_unknown(word) else None
        return UNKNOWN if number is None else Status(number != 0)

    def get_option(self, words: list[Value]) -> Status:
        """Takes an option of the arguments: ``getopts "a:b" option``."""
        if len(words) < 2:
            return Status(holds=False)
        options, name = read_as_bash(words[0]), read_as_bash(words[1])
        place = self.expander.calculate("OPTIND")[0] or 1
        arguments = self.shell.frame.arguments
        text = read_text(arguments[place - 1]) if 0 < place <= len(arguments) else ""
        if not re.match(r"-[^-]", text) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            return Status(holds=False)
        letter, rest, line = text[1], text[2:], self.shell.limits.line
        known = letter in options.replace(":", "")
        self.shell.variables.pop("OPTARG", None)
        self.shell.assign_text(name, (Segment(letter if known else "?", line),))
        if known and options[options.index(letter) + 1 :].startswith(":"):
            value = (Segment(rest, line),) if rest else arguments[place] if place < len(arguments) else ()
            self.shell.assign_text("OPTARG", value)
            place += 0 if rest else 1
        elif rest:  # several options in a word
            self.shell.frame.arguments = [*arguments]
            self.shell.frame.arguments[place - 1] = (Segment(f"-{rest}", line),)
            place -= 1
        self.shell.assign_number("OPTIND", place + 1)
        return Status()


def _find_broken(words: Sequence[Word]) -> tuple[LostPlace, ...]:
    """Returns the words of a command that swallowed the lines behind them, as an open quote does."""
    why = "a word holds several lines with arguments: a quote may be open"
    broken = [word for word in words if re.search(r"\n[ \t]*--[A-Za-z]", word.text)]
    programs = any(word.text in ("-c", "eval", "--wrap") or word.text.startswith("--wrap=") for word in words)
    return () if programs else tuple(LostPlace(word.line, why) for word in broken)


def _do_nothing(interpreter: Interpreter, words: list[Value]) -> Status:
    return Status()


def _run_words(interpreter: Interpreter, words: list[Value]) -> Status:
    """Follows what stands behind ``command``, ``builtin`` or ``exec``."""
    while words and read_text(words[0]).startswith("-"):
        if read_text(words[0]) in ("-v", "-V"):
            return UNKNOWN
        words = words[1:]
    if not words:
        return Status()
    return interpreter._start(words, interpreter.shell.limits.line, lost=tuple(interpreter.expander.lost))


_BUILTINS: dict[str, Callable[[Interpreter, list[Value]], Status]] = {
    **dict.fromkeys((":", "true", "trap", "ulimit", "shopt", "wait", "sleep", "hash", "umask", "alias"), _do_nothing),
    "false": lambda interpreter, words: Status(holds=False),
    "source": Interpreter.follow_file,
    ".": Interpreter.follow_file,
    "eval": Interpreter.evaluate,
    "shift": Interpreter.shift,
    "set": Interpreter.set_options,
    "exit": Interpreter.exit,
    "return": Interpreter.return_,
    "cd": Interpreter.change_folder,
    "pushd": Interpreter.change_folder,
    "popd": _do_nothing,
    "break": lambda interpreter, words: interpreter.leave_loop(words, goes_on=False),
    "continue": lambda interpreter, words: interpreter.leave_loop(words, goes_on=True),
    "read": Interpreter.read_line,
    "mapfile": lambda interpreter, words: UNKNOWN,
    "readarray": lambda interpreter, words: UNKNOWN,
    "let": Interpreter.let,
    "getopts": Interpreter.get_option,
    "test": lambda interpreter, words: interpreter.conditions.test_words(words),
    "[": lambda interpreter, words: interpreter.conditions.test_words(words[:-1]),
    "command": _run_words,
    "builtin": _run_words,
    "exec": _run_words,
}


ARGUMENTS = "--args"
"""The file of words that the user gives as arguments of a script."""


def run_script(
    text: str,
    where: str,
    folder: Path | None = None,
    environment: Mapping[str, str] = {},
    arguments: Sequence[str] = (),
) -> ScriptRun:
    """Returns what a script would run.

    where: the file, for messages.
    folder: where it lies, for files beside it.
    environment: variables that are set when it starts.
    arguments: of the script; without any, none are known.
    Raises PlanError for a script that is too large, or that takes too long to follow.
    """
    return run_text(
        (Segment(text.replace("\r\n", "\n"), 1),),
        where,
        folder,
        {name: Word(value, 0) for name, value in environment.items()},
        [Word(argument, 0, file=ARGUMENTS) for argument in arguments],
    )


def run_text(
    value: Value,
    where: str,
    folder: Path | None,
    environment: Mapping[str, Word],
    arguments: Sequence[Word],
    limits: StepLimits | None = None,
) -> ScriptRun:
    """Returns what a text of bash would run, which may come from several lines of a script."""
    lines, size = [], 0
    for segment in value:
        lines.append((size, segment.line, segment.file))
        size += len(segment.text.encode("utf-8", "replace"))
    text = read_text(value)
    shell = Shell(where, folder, limits or StepLimits(where))
    shell.frames.append(Frame([from_word(word) for word in arguments], is_given=bool(arguments)))
    for name, word in {**list_slurm_variables(read_directives(text)), **environment}.items():
        shell.variables[name] = Variable({0: from_word(word)}, exported=True)
    source = parse(text, where, tuple(lines))
    shell.limits.depth = 0
    with suppress(_ExitShell, _ReturnFromFunction, _LeaveLoop):
        Interpreter(shell).run_source(source)
    variables = {
        name: tuple(as_word(element, 1) for element in variable.elements.values())
        for name, variable in shell.variables.items()
        if variable.elements or variable.is_array
    }
    return ScriptRun(
        tuple(shell.commands),
        variables,
        shell.files,
        read_directives(text),
        tuple(dict.fromkeys(shell.lost)),
        tuple(shell.positional),
    )
