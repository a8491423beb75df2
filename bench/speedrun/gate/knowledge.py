"""Tables of facts that the gate's questions are made from: every row is (what is asked about, its answer)."""

CAPITALS = """
France:Paris Italy:Rome Spain:Madrid Germany:Berlin Portugal:Lisbon Greece:Athens Norway:Oslo Sweden:Stockholm
Finland:Helsinki Denmark:Copenhagen Poland:Warsaw Austria:Vienna Hungary:Budapest Ireland:Dublin Belgium:Brussels
Russia:Moscow Japan:Tokyo China:Beijing Thailand:Bangkok Egypt:Cairo Kenya:Nairobi Peru:Lima Chile:Santiago
Cuba:Havana Canada:Ottawa Turkey:Ankara Iran:Tehran Iraq:Baghdad Vietnam:Hanoi Ethiopia:Addis_Ababa
Argentina:Buenos_Aires Australia:Canberra Romania:Bucharest Bulgaria:Sofia Ukraine:Kyiv Morocco:Rabat Senegal:Dakar
Ghana:Accra Mongolia:Ulaanbaatar Nepal:Kathmandu Iceland:Reykjavik Uruguay:Montevideo
"""

ELEMENT_SYMBOLS = """
hydrogen:H helium:He carbon:C nitrogen:N oxygen:O sodium:Na magnesium:Mg aluminium:Al silicon:Si phosphorus:P sulfur:S
chlorine:Cl potassium:K calcium:Ca iron:Fe copper:Cu zinc:Zn silver:Ag tin:Sn gold:Au mercury:Hg lead:Pb uranium:U
nickel:Ni tungsten:W neon:Ne lithium:Li titanium:Ti iodine:I cobalt:Co
"""

YOUNG_ANIMALS = """
dog:puppy cat:kitten cow:calf horse:foal sheep:lamb goat:kid pig:piglet bear:cub deer:fawn duck:duckling goose:gosling
frog:tadpole hen:chick swan:cygnet kangaroo:joey owl:owlet eagle:eaglet hare:leveret
"""

OPPOSITES = """
hot:cold big:small early:late full:empty strong:weak light:dark fast:slow young:old wet:dry rich:poor loud:quiet
open:closed above:below buy:sell begin:end win:lose push:pull heavy:weightless ancient:modern brave:cowardly
expand:shrink accept:refuse arrive:depart remember:forget shallow:deep sharp:blunt smooth:rough generous:stingy
victory:defeat import:export maximum:minimum horizontal:vertical
"""

CLASSES = """
salmon:fish eagle:bird frog:amphibian snake:reptile whale:mammal ant:insect spider:arachnid bat:mammal penguin:bird
crocodile:reptile bee:insect shark:fish toad:amphibian scorpion:arachnid dolphin:mammal tuna:fish lizard:reptile
beetle:insect ostrich:bird newt:amphibian
"""

LANGUAGES = """
Brazil:Portuguese Mexico:Spanish Egypt:Arabic Austria:German Japan:Japanese Israel:Hebrew Iran:Persian Greece:Greek
Poland:Polish Kenya:Swahili Vietnam:Vietnamese Turkey:Turkish Sweden:Swedish Hungary:Hungarian Thailand:Thai
"""

WORK_PLACES = """
pilot:cockpit surgeon:operating_theatre judge:courtroom chef:kitchen librarian:library farmer:field miner:mine
astronomer:observatory chemist:laboratory teacher:classroom sailor:ship actor:stage banker:bank baker:bakery
"""

DEFINITIONS = {
    "photosynthesis": "how plants make sugar from light, water and carbon dioxide",
    "evaporation": "a liquid turning into vapour",
    "erosion": "soil and rock being worn away by wind or water",
    "gravity": "the force that pulls masses towards each other",
    "democracy": "government by the people, usually through elections",
    "inflation": "a general rise of prices over time",
    "biography": "the story of a person's life written by someone else",
    "migration": "moving from one region to another, often with the seasons",
    "orbit": "the path of a body around a star or planet",
    "vaccine": "a preparation that trains the body against a disease",
    "a glacier": "a large mass of ice that moves slowly over land",
    "a peninsula": "land with water on three sides",
    "an archipelago": "a group of islands",
    "a herbivore": "an animal that eats plants",
    "a nocturnal animal": "one that is active at night",
    "a synonym": "a word with nearly the same meaning as another",
    "a hypothesis": "an explanation proposed in order to be tested",
    "an algorithm": "a finite list of steps that solves a problem",
    "a compiler": "a program that translates source code into machine code",
    "a cache": "a store that keeps recent data close, so that it is found faster",
    "a stack": "a collection in which the last item added is the first removed",
    "a queue": "a collection in which the first item added is the first removed",
    "recursion": "a function calling itself on a smaller problem",
    "latency": "the delay between a request and its answer",
    "bandwidth": "the amount of data that can be moved each second",
    "a checksum": "a short value that reveals whether data has changed",
    "encryption": "turning text into a form that only a key can read",
    "a variable": "a name that holds a value in a program",
    "a prime number": "a number above one that only one and itself divide",
    "a triangle": "a figure with three sides",
    "the perimeter": "the distance around a figure",
    "the median": "the middle value of a sorted list",
    "a decade": "a period of ten years",
    "a century": "a period of one hundred years",
    "a famine": "an extreme lack of food in a region",
    "a treaty": "a written agreement between states",
    "a census": "an official count of a population",
    "a monologue": "a long speech by one person",
    "a fossil": "what is preserved of an ancient living thing",
    "a drought": "a long time without enough rain",
    "an eclipse": "one body in space hiding another from view",
    "a vertebrate": "an animal with a backbone",
    "a metaphor": "speaking of one thing as if it were another",
    "friction": "the resistance of surfaces that slide on each other",
    "insulation": "material that slows the passage of heat",
    "a thermometer": "an instrument that measures temperature",
    "a barometer": "an instrument that measures air pressure",
    "a compass": "an instrument that shows where north is",
    "a mutex": "a lock that lets one thread at a time into a section of code",
    "a palindrome": "a word that reads the same in both directions",
}

SEQUENCES = (
    ("day of the week", "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    ("month", "January February March April May June July August September October November December"),
    ("planet (counted from the sun)", "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    ("letter of the alphabet", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
    ("ordinal number", "first second third fourth fifth sixth seventh eighth ninth tenth"),
)

SIZES = {
    "is the largest": "an ant, a mouse, a cat, a dog, a horse, an elephant, a blue whale",
    "lasts the longest": "a second, a minute, an hour, a day, a week, a month, a year, a decade, a century",
    "is the longest distance": "a millimetre, a centimetre, a metre, a kilometre, a light year",
    "is the heaviest": "a feather, a letter, an apple, a brick, a bicycle, a car, a locomotive",
    "is the fastest": "a snail, a tortoise, a walking person, a galloping horse, a racing car, a jet, light",
    "is the hottest": "an ice cube, a cool room, bath water, boiling water, molten iron, the core of the sun",
    "holds the most data": "a bit, a byte, a kilobyte, a megabyte, a gigabyte, a terabyte",
}
"""Each list from least to most."""

EVENTS = (
    (1215, "Magna Carta was sealed"),
    (1455, "Gutenberg printed his Bible"),
    (1492, "Columbus reached the Americas"),
    (1522, "the first voyage around the world ended"),
    (1687, "Newton published his Principia"),
    (1776, "the United States declared independence"),
    (1789, "the French Revolution began"),
    (1815, "the battle of Waterloo was fought"),
    (1859, "Darwin published On the Origin of Species"),
    (1876, "the telephone was patented"),
    (1903, "the Wright brothers flew"),
    (1914, "the First World War began"),
    (1928, "penicillin was discovered"),
    (1945, "the Second World War ended"),
    (1957, "Sputnik was launched"),
    (1969, "people first walked on the Moon"),
    (1989, "the Berlin Wall fell"),
    (2007, "the first iPhone was sold"),
)
"""In order of their years, no two the same."""


def pairs(table: str) -> list[tuple[str, str]]:
    """Rows of a table in the form above; underscores stand for spaces."""
    rows = [entry.replace("_", " ").partition(":") for entry in table.split()]
    return [(asked, answer) for asked, _, answer in rows]
