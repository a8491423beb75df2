"""Long reports made by rule: the text of the long-prompt scenario."""

import random
from collections.abc import Iterator

PLACES = (
    "Alder Bridge",
    "North Quay",
    "Stone Mill",
    "Heron Lake",
    "Upper Ford",
    "Salt Harbour",
    "Fox Hollow",
    "Long Meadow",
    "Castle Rise",
    "Willow Lock",
    "Cold Spring",
    "East Weir",
    "Amber Point",
    "Grey Tower",
    "Juniper Pass",
    "Old Foundry",
)
PEOPLE = ("Ines Albrecht", "Tomas Keller", "Mara Lindqvist", "Owen Price", "Yuki Tanabe", "Leila Haddad", "Pavel Novak")
QUANTITIES = (
    "water level",
    "flow rate",
    "battery charge",
    "air temperature",
    "salt content",
    "gate pressure",
    "rainfall",
)
CAUSES = (
    "a worn seal",
    "driftwood at the intake",
    "a firmware update that was rolled back",
    "frost in the pipe",
    "a loose cable",
    "an error in the table of calibration values",
    "roadworks on the way to the station",
    "a sensor that had been mounted upside down",
)
ACTIONS = (
    "replaced the part on the same day",
    "asked for a second opinion",
    "wrote a note to the workshop",
    "repeated the measurement twice",
    "closed the gate by hand",
    "left the setting unchanged until the next visit",
    "compared the values with those of the neighbouring station",
)
JUDGEMENTS = (
    "The cause is understood.",
    "Nobody can say yet whether it will happen again.",
    "The cost was within the estimate.",
    "This is the third time this year.",
    "The values have been plausible since then.",
    "A decision is expected in the spring.",
    "The residents were informed by letter.",
)


def document_text(rng: random.Random) -> Iterator[str]:
    """A title and numbered sections, without end. Documents differ from their first line on."""
    number, year = rng.randrange(10_000, 99_999), rng.randint(1990, 2024)
    yield f"Report {number} on the measuring stations of the river in the year {year}\n"
    section = 0
    while True:
        section += 1
        place = rng.choice(PLACES)
        yield f"\n{section}. {place}\n\n"
        for _ in range(rng.randint(4, 8)):
            yield sentence(rng, place) + " "
        yield "\n"


def sentence(rng: random.Random, place: str) -> str:
    day, low = rng.randint(1, 28), rng.randint(3, 400)
    rise, minutes = rng.randint(2, 90), rng.randint(2, 50)
    quantity, person = rng.choice(QUANTITIES), rng.choice(PEOPLE)
    forms = (
        f"On day {day} the {quantity} at {place} rose from {low} to {low + rise} within {minutes} minutes.",
        f"{person} inspected the station, found {rng.choice(CAUSES)} and {rng.choice(ACTIONS)}.",
        f"Between visits {day} and {day + rise} the mean {quantity} was {low}.{rng.randint(0, 9)}, "
        f"which is {rng.randint(1, 40)} percent below the year before.",
        f"Compared with {rng.choice(PLACES)}, the {quantity} varied less; {person} suspects {rng.choice(CAUSES)}.",
        f"The alarm of day {day} was caused by {rng.choice(CAUSES)}; {person} {rng.choice(ACTIONS)}.",
        rng.choice(JUDGEMENTS),
    )
    return rng.choice(forms)
