"""Sentences that the scenarios' prompts are assembled from."""

PLANS = (
    "a walking tour along the coast",
    "the move of our library into a new building",
    "a science fair",
    "a small conference on public transport",
    "a community garden",
    "the restoration of an old ferry",
    "a cooking course",
    "a chess tournament",
    "the anniversary of our orchestra",
    "a repair workshop for bicycles",
    "an exhibition of maps",
    "a weekend course in pottery",
    "the first season of a rowing club",
    "a series of evening lectures on astronomy",
    "the harvest festival of the valley",
    "a film night in the park",
)

CONSTRAINTS = (
    "The budget is {m} euros and cannot grow.",
    "About {n} of them have never done anything like it.",
    "The hall is free on Saturday, but only from ten in the morning.",
    "Two of the helpers will arrive late because their train is often delayed.",
    "We have {n} chairs, and {n} more can be borrowed from the school.",
    "It rained during the last one, and nobody had thought of a tent.",
    "Some guests do not eat meat, and one is allergic to nuts.",
    "The nearest car park holds {n} cars and closes at eight.",
    "My colleague thinks that fewer speeches would help; I am not sure.",
    "We kept a list of what went wrong last time, and it has {n} entries.",
    "Printing costs {m} cents a page, which adds up quickly.",
    "The insurance asks for a written plan with names and telephone numbers.",
    "A local newspaper wants to write about it, with a photograph.",
    "The electricity in the yard is enough for {n} lamps at most.",
    "There is a storeroom with {m} boxes that nobody has opened in years.",
    "Children are welcome, so there should be something for them to do.",
    "Last year the programme took an hour longer than announced.",
    "The mayor has promised to come and will stay for {n} minutes.",
    "We would like to spend nothing on decoration.",
    "If it works, we will do it again with {m} people.",
)

REPLIES = (
    "That sounds like a good plan. I would begin with the date, the place and the one thing that must not fail, and "
    "give each of them a person who is responsible.",
    "Most of this is a question of order. Decide what cannot be moved first, write it down, and let the rest follow.",
    "I would split it into three parts: what has to be ready a week before, what happens on the day, what comes after.",
    "The numbers fit, but there is little room for surprises, so keep a tenth of the budget for what nobody foresaw.",
    "It helps to walk through the day in your mind from the first arrival to the last departure.",
)

FOLLOW_UPS = (
    "Thank you. Write a detailed plan, week by week, with the reason for each step.",
    "That helps. Now list the risks from the most to the least likely, and say for each what I should prepare.",
    "Good. Describe the whole day hour by hour, and explain what everybody has to do.",
    "I see. Write a long letter to the helpers that explains the plan and asks them for what we need.",
    "Let us go deeper. Compare three ways to do it, with what speaks for and against each of them.",
)

CODE_REQUESTS = (
    "Explain step by step what this code does, then rewrite it with clearer names and comments.",
    "Find the weaknesses of this code, explain each one, and write an improved version in full.",
    "Write a complete set of unit tests for this code and explain what each test protects.",
    "Translate this code into another programming language and explain the differences in detail.",
    "Describe how this code behaves with an empty, a huge and a wrong input; then write the checks it lacks.",
)

MATH_PROBLEMS = (
    "A train travels {a} kilometres in {c} hours and then {b} kilometres in the next {c} hours.",
    "A tank holds {b} litres; one pump fills {c} litres a minute and a leak loses one litre every {a} seconds.",
    "A shop sells {a} notebooks at {c} euros each and gives {c} percent off when a customer buys more than {b}.",
    "A rectangle is {a} metres wide and {b} metres long, and a path {c} metres wide runs around it.",
    "Of {b} students, {a} play chess, {c} play both chess and tennis, and the others play tennis only.",
    "A number leaves the remainder {c} when it is divided by {b} and by {a}.",
    "A saver puts {b} euros into an account at {c} percent a year and adds {a} euros at the end of every year.",
    "Two cyclists start {b} kilometres apart and ride towards each other at {a} and {c} kilometres an hour.",
    "A recipe for {c} people needs {b} grams of flour and {a} grams of butter.",
    "A ladder of {c} metres leans against a wall and its foot stands {a} centimetres away from it.",
    "In a bag are {a} red, {b} blue and {c} white balls, and two are drawn without looking.",
    "A sequence starts with {c}, and each term is {a} more than twice the one before.",
)

MATH_CLOSING = (
    "Choose the question that each of these situations suggests, and solve all of them step by step. "
    "Write down every intermediate result, and check each answer at the end."
)

DOCUMENT_REQUESTS = (
    "Summarize the report above: what was found, what is still open, and what should be done first?",
    "Which three stations in the report above need attention most, and why?",
    "Write a short note to the director about the most important points of the report above.",
    "What changed during the period that the report above covers? Answer in a few sentences.",
)
