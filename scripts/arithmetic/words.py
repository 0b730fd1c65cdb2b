"""The words of the arithmetic problems: every phrase of a kind says the same, and any of them may be drawn.

Phrases are lines with slots, which `generator` fills. {who} holds the quantity and {other} is the second person, of
the other gender, so that {he} is never ambiguous; {left} {k} and {eq} are the numbers and the equation; {things} is
plural, while {noun} agrees with the result and {before} with {left}.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of step, and the ways to tell it, to ask for its result, and to work it out; one line each."""

    name: str
    sign: str
    tell: str
    ask: str
    work: str
    pair: bool = False  # it brings in a second person
    last: bool = False  # nothing can follow

    @property
    def opens(self) -> bool:
        """Whether the event starts a story without an opening sentence."""
        return self.sign == "*" and not self.pair


GIRLS = "Anna Mia Lily Sara Emma Lucy Ella Zoe Ruby Nora Amy Kate Rosa Eva Jane Mary Sue Lena Tina Molly"
BOYS = "Tom Ben Max Sam Tim Leo Jack Adam Paul Mark Dan Fred Nick Luke Finn Bob Jim Peter Will Oscar"
KIN = "mother father brother sister aunt uncle grandmother grandfather cousin teacher neighbor friend"
THINGS = """
    apple pear plum orange lemon cookie muffin carrot nut egg shell stone feather marble button sticker stamp card
    book pencil pen crayon balloon ball toy block bead ribbon flower acorn doll kite ring bell candle cup hat sock
    key star picture
"""
BOXES = "box bag basket jar bucket tin"
TRAYS = "pile stack pack set group bundle"
SCENES = """
    one day
    one sunny day
    on a rainy day
    on Monday
    on Friday
    on Sunday
    in the morning
    this week
    this summer
    before lunch
    after school
    at the park
"""
OPENINGS = """
    {who} has {left} {things}.
    {who} owns {left} {things}.
    {who} starts out with {left} {things}.
    {who} counts {left} {things} at home.
    there are {left} {things} in {who}'s {boxes}.
    {who} brings {left} {things}.
"""
_HAS = """
    how many {things} does {who} have?
    how many {things} does {he} have?
    how many {things} does {who} have in all?
    can you tell how many {things} {who} has?
    what is the number of {things} that {who} has?
"""
_NOW = """
    how many {things} does {who} have now?
    how many {things} does {he} have now?
    how many {things} does {who} have in the end?
    can you tell how many {things} {who} has now?
    what is the number of {things} that {who} has in the end?
"""
KINDS = (
    Kind("groups", "*", """
        {who} has {left} {boxes} with {k} {things} in each.
        {who} fills {left} {boxes} with {k} {things} each.
        {who} finds {left} {boxes}, and each one holds {k} {things}.
        {who} gets {left} {boxes} from {his} {kin}, with {k} {things} in each.
        there are {left} {boxes}, and {who} puts {k} {things} into each one.
    """, _HAS, """
        that is {eq} {things} in all.
        {left} {boxes} of {k} make {eq} {things}.
        the {boxes} hold {eq} {things}.
        with {k} in each, {who} has {eq} {things}.
        so {he} has {eq} {things}.
    """),
    Kind("sell", "*", """
        {who} sells {left} {things} for {k} coins each.
        {who} sells {left} {things} and gets {k} coins for each one.
        {who} sells {left} {things} at a price of {k} coins each.
        a friend buys {left} {things} from {who} and pays {k} coins for each.
        {who} brings {left} {things} to a shop that pays {k} coins for each one.
    """, """
        how many coins does {who} get?
        how many coins does {he} get in all?
        how many coins does {who} get for the sale?
        how many coins does {who} earn in this way?
        what is the number of coins that {who} earns?
    """, """
        {who} gets {eq} coins.
        that brings {him} {eq} coins.
        for {left} at {k} coins each, {he} gets {eq} coins.
        selling {left} brings {eq} coins.
        at {k} coins each, that makes {eq} coins.
    """),
    Kind("gain", "+", """
        {his} {kin} gives {him} {k} more {things}.
        then {he} finds {k} more {things} in the garden.
        later {he} gets {k} more {things} from {his} {kin}.
        then {who} wins {k} more {things} in a game.
        after that, {who} gets another {k} {things}.
    """, _NOW, """
        after getting {k} more, {who} has {eq} {noun}.
        with {k} more, that makes {eq} {noun}.
        {who} gets {k} more, so {he} has {eq}.
        adding {k} gives {eq} {noun}.
        {left} {before} and {k} more make {eq}.
    """),
    Kind("lose", "-", """
        {he} gives {k} {things} to {his} {kin}.
        then {who} loses {k} {things} on the way home.
        later {he} gives away {k} of the {things}.
        {his} {kin} takes {k} of the {things}.
        after that, {who} leaves {k} {things} with {his} {kin}.
    """, """
        how many {things} does {who} have left?
        how many {things} are left for {him}?
        how many {things} does {he} have now?
        how many {things} does {who} still have?
        how many {things} does {who} have in the end?
    """, """
        without those {k}, {who} has {eq} {noun}.
        taking away {k} leaves {eq} {noun}.
        {k} are gone, so {he} has {eq} left.
        after that, {he} has {eq} {noun}.
        {who} had {left} and now has {eq}.
    """),
    Kind("more", "+", """
        {other} has {k} more {things} than {who}.
        {his} friend {other} has {k} more {things} than {he} does.
        {other} counts {k} more {things} than {who} has.
        compared with {who}, {other} has {k} more {things}.
        {who} sees that {other} has {k} more {things} than {he} has.
    """, _HAS, """
        {other} has {k} more, which is {eq} {noun}.
        since {other} has {k} more, that makes {eq} {noun}.
        so {other} has {eq} {noun}.
        with {k} more, {other} has {eq} {noun}.
        for {other}, that is {eq}.
    """, pair=True),
    Kind("fewer", "-", """
        {other} has {k} fewer {things} than {who}.
        {his} friend {other} has {k} fewer {things} than {he} does.
        {other} counts {k} fewer {things} than {who} has.
        compared with {who}, {other} has {k} fewer {things}.
        {who} sees that {other} has {k} fewer {things} than {he} has.
    """, _HAS, """
        {other} has {k} fewer, which is {eq} {noun}.
        since {other} has {k} fewer, that leaves {eq} {noun}.
        so {other} has {eq} {noun}.
        with {k} fewer, {other} has {eq} {noun}.
        for {other}, that is {eq}.
    """, pair=True),
    Kind("times", "*", """
        {other} has {times} as many {things} as {who}.
        {his} friend {other} has {times} as many {things} as {he} does.
        {other} counts {times} as many {things} as {who} has.
        compared with {who}, {other} has {times} as many {things}.
        {who} sees that {other} has {times} as many {things} as {he} has.
    """, _HAS, """
        {other} has {times} as many, which is {eq} {things}.
        since {other} has {times} as many, that makes {eq} {things}.
        so {other} has {eq} {things}.
        with {times} as many, {other} has {eq} {things}.
        for {other}, that is {eq}.
    """, pair=True),
    Kind("together", "+", """
        {other} has {k} {things}.
        {his} friend {other} has {k} {things}.
        {other} comes to visit with {k} {things}.
        next to {him}, {other} counts {k} {things}.
        then {he} meets {other}, who has {k} {things}.
    """, """
        how many {things} do they have together?
        how many {things} do {who} and {other} have in all?
        how many {things} do the two of them have?
        if they put them all together, how many {things} are there?
        what is the number of {things} that both have together?
    """, """
        together they have {eq} {noun}.
        {who} and {other} have {eq} {noun} in all.
        with the {k} of {other}, that makes {eq} {noun}.
        adding {k} from {other} gives {eq} {noun}.
        the two have {eq} {noun}.
    """, pair=True, last=True),
    Kind("difference", "-", """
        {other} has only {k} {things}.
        {his} friend {other} has just {k} {things}.
        {other} comes to visit with just {k} {things}.
        next to {him}, {other} counts only {k} {things}.
        then {he} meets {other}, who has only {k} {things}.
    """, """
        how many more {things} does {who} have than {other}?
        how many more {things} than {other} does {he} have?
        by how many {things} is {who} ahead of {other}?
        how many {things} does {other} need to catch up with {who}?
        what is the difference between their numbers of {things}?
    """, """
        the difference is {eq} {noun}.
        {other} has {k}, so the difference is {eq}.
        compared with {k}, that is {eq} more.
        {who} is ahead of {other} by {eq} {noun}.
        between {who} and {other}, the difference is {eq}.
    """, pair=True, last=True),
    Kind("share", "/", """
        {he} shares all the {things} equally among {k} children.
        then {who} splits the {things} evenly among {k} children.
        {k} children share all of {his} {things} equally.
        {he} divides all the {things} into equal parts for {k} children.
        then {who} gives the {things} to {k} children, the same number to each.
    """, """
        how many {things} does each child get?
        how many {things} are there for each child?
        how many {things} does every child receive?
        what is the number of {things} for one child?
        how many of the {things} go to each child?
    """, """
        shared among {k}, each child gets {eq} {noun}.
        each of the {k} children gets {eq} {noun}.
        splitting by {k} gives each child {eq} {noun}.
        for {k} children, one share is {eq} {noun}.
        with {k} children, each receives {eq} {noun}.
    """, last=True),
    Kind("pack", "/", """
        {he} puts all the {things} into {trays} of {k}.
        then {who} makes {trays} of {k} {things} each.
        {he} sorts all the {things} into {trays} of {k}.
        with all the {things}, {he} makes {trays} of {k}.
        {his} {kin} helps {him} to put the {things} into {trays} of {k}.
    """, """
        how many {trays} are there?
        how many {trays} does {who} get?
        how many {trays} does that make?
        how many {trays} does {he} have in the end?
        what is the number of {trays}?
    """, """
        that makes {eq} {tray}.
        with {k} in each, {who} gets {eq} {tray}.
        in {trays} of {k}, that makes {eq} {tray}.
        putting {k} into each gives {eq} {tray}.
        {trays} of {k} make {eq} {tray}.
    """, last=True),
)  # fmt: skip
