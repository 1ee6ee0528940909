"""The closed word-level vocabulary of the needle model and of the documents that test it.

Every word is one token; text is words joined by single spaces. Token ids are positions in
`VOCABULARY`, and words of one class have contiguous ids (`KEYS`, `VALUES`, ... are `range`s of
ids), so that a random word of a class is a random integer.
"""

# Word lists are easier to read and to extend as text.
# ruff: noqa: SIM905

from __future__ import annotations

from collections.abc import Sequence

_ADJECTIVES = """amber bold calm dusty eager faded gentle hollow ivory jolly keen lively misty noble
opal proud quiet rapid silver tidy upper velvet wild young zesty brave crimson distant early frosty
golden humble""".split()
_ANIMALS = """falcon badger cricket dolphin eagle ferret gecko heron ibis jackal koala lemur magpie
newt otter panther quail raven salmon tiger urchin viper walrus yak zebra beaver condor donkey egret
finch gopher hornet""".split()
_CANDIDATES = """cedar maple birch willow aspen walnut poplar hazel elder rowan alder laurel cypress
spruce larch juniper linden hickory sequoia hawthorn chestnut acacia olive mulberry""".split()
_MARKERS = """document note list link vote quote ask gather trace tally recite then answer two three
four""".split()

# Filler words by part of speech; sentences are drawn from `TEMPLATES`.
_FILLER: dict[str, list[str]] = {
    "D": "the a this that every another one each some our their his her its my".split(),
    "A": """big small old new slow warm cold dry heavy light narrow wide plain clean rough smooth
    empty full strong weak simple common local modern ancient public private usual rare useful broken
    careful cheerful curious daily direct entire famous final fresh green blue red white dark bright
    deep high low long short thin thick tall flat round sharp soft hard loud safe steady strange
    sudden sweet true whole""".split(),
    "N": """road house garden river bridge market letter window table captain teacher farmer village
    winter summer morning evening story paper machine engine station train ship harbour island
    mountain valley forest field storm cloud rain snow fire lamp candle mirror clock bell tower
    castle wall gate door room kitchen bread butter cheese fruit apple basket bottle cup plate knife
    chair carpet blanket coat shoe hat ring coin box map journey path corner street city country
    school church office shop worker driver doctor baker painter singer writer reader child brother
    sister mother father friend neighbour stranger visitor crowd team group family army song music
    picture book page line word question plan idea dream memory lesson game prize party wedding
    meeting moment hour week month year century""".split(),
    "V": """found carried opened closed painted repaired watched followed crossed visited left
    reached built sold bought moved lifted pushed pulled dropped kept lost hid showed described
    remembered forgot admired measured cleaned covered filled emptied joined passed guarded shared
    saved borrowed returned ordered counted studied noticed heard""".split(),
    "R": """slowly quickly often never always gladly later again soon once almost perhaps together
    nearby outside early""".split(),
    "P": "near under over behind before after beside beyond across along inside with without".split(),
    "C": "and but while because so until when".split(),
    "S": ".".split(),
    "K": ",".split(),
}
TEMPLATES = """DANVDNS DNVDNPDNS PDNDNVDANS DNRVDANS DNVDNCDNVDNS RKDNVDNS DANPDNVDNRS DNCDNVDANPDNS
PDANKDNVDNS DNVDANKCDNRVDNS DANVRS DNVDNPDNCDNVDANRS""".split()

# Words that stand only in quotes, each at most once in a document as long as they last.
_QUOTED = """abbey acorn alcove almond anchor anthem apron arbor arcade armor arrow atlas attic
autumn avenue azure badge bagpipe bakery balcony ballad bamboo banner banquet barley barrel basalt
beacon beetle bellows berry bonfire border boulder bouquet bramble brass breeze brick bronze brook
bucket buckle bugle bundle cabin cactus camel canal canoe canvas canyon caravan cargo carnival
carriage cavern cellar chalice chalk chapel chariot cherry chimney cinder cinnamon cipher circus
citadel citrus clover cobalt cocoa comet compass copper coral cotton courier cradle crater crayon
crescent crown crystal curtain cymbal daisy dawn delta desert diamond dome dragon drizzle drum dune
dusk easel echo eclipse elbow elixir ember emerald empire ermine estuary fable feather fern festival
fiddle flask flint flute fountain fresco frigate frost galaxy galleon garland garnet geyser ginger
glacier glove goblet gondola granite grotto guitar gypsum hammock hamlet harp harvest haven hearth
hedge helmet hermit hilltop honey horizon hourglass iceberg incense indigo inkwell iris ironwork
jasmine jester jewel jigsaw jubilee jungle kernel kettle keystone kite labyrinth lace lagoon lantern
lark lava lavender legend lemon lentil library lichen lighthouse lilac locket lotus lute lyric
magnet mandolin mantle marble marigold marsh mask meadow medal melody meteor mill mint mosaic moss
mural muslin myrtle nectar nettle novel nutmeg oasis oatmeal obelisk ocean orbit orchard orchid
organ origami osprey oyster paddle pageant palace parade parchment parlor pebble pennant pepper
petal phantom piano pigment pilgrim pillar plaza plume pocket pond porcelain portal prairie prism
pumpkin quarry quartz quill quiver""".split()


def _lay_out() -> tuple[tuple[str, ...], dict[str, range]]:
    """All words in id order, and the id range of every class."""
    classes: dict[str, Sequence[str]] = {
        "special": ["<pad>", "<end>", "<unk>"],
        "marker": _MARKERS,
        "key": [f"{a}-{n}" for a in _ADJECTIVES for n in _ANIMALS],
        "value": [f"{i:03d}" for i in range(1000)],
        "candidate": _CANDIDATES,
        "quoted": _QUOTED,
        **{f"filler:{name}": words for name, words in _FILLER.items()},
    }
    words: list[str] = []
    ranges: dict[str, range] = {}
    for name, members in classes.items():
        ranges[name] = range(len(words), len(words) + len(members))
        words.extend(members)
    if len(set(words)) != len(words):
        twice = sorted({w for w in words if words.count(w) > 1})
        raise ValueError(f"every word must stand in one class once; these stand twice: {twice}")
    return tuple(words), ranges


VOCABULARY, _RANGES = _lay_out()
WORD_TO_ID: dict[str, int] = {word: i for i, word in enumerate(VOCABULARY)}
PAD, END, UNK = _RANGES["special"]
KEYS = _RANGES["key"]
VALUES = _RANGES["value"]
CANDIDATES = _RANGES["candidate"]
QUOTED = _RANGES["quoted"]
FILLER: dict[str, range] = {name: _RANGES[f"filler:{name}"] for name in _FILLER}
STOP = FILLER["S"][0]
END_WORD = VOCABULARY[END]


def encode(text: str) -> list[int]:
    """Token ids of `text` (words separated by white space); an unknown word becomes `UNK`."""
    return [WORD_TO_ID.get(word, UNK) for word in text.split()]


def decode(ids: Sequence[int]) -> str:
    """The text of token ids: words joined by single spaces."""
    return " ".join(VOCABULARY[i] for i in ids)
