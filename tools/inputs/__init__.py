"""The corpus of launch files: what people start training with, and the facts that a right reader takes from it.

A file of `corpus/` is about a program and holds entries. An entry names a public file by repository, commit and path,
says how it is started, and states the facts that the file and the program's defaults at that release determine. The
facts come from the program's code (`because` names the place), never from what the reader of launch files answers.
No public file is copied: `states` is a small file of ours that states the same settings in the same syntax, with the
construct that makes the public file hard to read; the tests give it to the reader where the public file is not at hand.
A copy of the public files, for the scoreboard, lies in a folder OWNER+NAME/PATH.

Fields of an entry::

    repository, commit, path    the file: owner/name, 40 hex digits, a path
    companions                  files of that repository that must lie beside it (DeepSpeed JSON, sourced scripts)
    command                     what a user types with it: --args and --env of the command line, empty for none
    program                     the program that runs it (PROGRAMS)
    given                       what a user has to give with --set because the file truly does not hold it
    expect                      facts (Facts); undetermined ones are left out
    asks                        names of facts that a right reader has to ask for: nothing determines them
    refuse                      why the file is refused by name instead (program not read, no training of a language
                                model)
    because                     sources of the facts that the file does not show
    states, states_beside       the small file of ours, and the texts that lie beside it by name

`asks` may stand beside `expect`: these facts hold once the question is answered; `refuse` stands alone, but for a
rollout: a program of reinforcement learning has `expect` for its training half and `refuse` for the other half.

To add a file: read it, then the program at its release (argument parser, defaults, what is done with the arguments
afterwards); write the entry with both in view; run ``pytest tests/tools/inputs``.
"""
