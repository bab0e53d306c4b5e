"""Texts that the benchmarks of speculation and the proof of its exactness are asked about."""

from __future__ import annotations

STORIES = (
    "a lighthouse keeper who finds a message in a bottle",
    "two rival bakers in a small mountain village",
    "a clock that runs backwards for one hour every night",
    "a child who learns the language of crows",
    "the last train from a town that is about to be flooded",
    "a gardener on a space station whose only tree falls ill",
    "a translator who finds a word that nobody has ever used",
    "an old sailor who is afraid of the sea",
)

# What a form asks for, and the text that has the answers.
LETTERS = (
    (
        ("customer", "order_number", "item", "quantity", "price", "delivery_date", "city"),
        "Dear Sir or Madam, my name is Eleanor Whitcombe. On 3 March I ordered four walnut bookshelves (order number "
        "HX-20931-B) from your shop at a price of 189.50 euros each. You promised delivery to my flat in Antwerp by 21 March, "
        "but so far only three of them have arrived. Please send the missing one, or give me my money back.",
    ),
    (
        ("patient", "age", "complaint", "medicine", "dose", "next_visit", "doctor"),
        "Note of 14 October. Mr Tomasz Lindqvist, 57 years old, came with pain in his left knee that has been getting worse "
        "for three weeks. No swelling, no fever. I have prescribed ibuprofen, 400 mg, three times a day, for ten days. "
        "He will come again on 28 October; if there is no improvement, we will take an X-ray. Dr. Amara Okonkwo-Bright.",
    ),
    (
        ("title", "author", "publisher", "year", "pages", "isbn", "price"),
        "New this month at Harbour Lane Press: 'The Cartographer of Small Rivers' by Ines Valderrama-Holt, the long-awaited "
        "second novel by the author of 'Salt'. Hardcover, 412 pages, published in 2021, ISBN 978-1-4028-9462-6, 24.99 pounds. "
        "A first printing of 12,000 copies is on its way to bookshops.",
    ),
    (
        ("position", "company", "location", "salary", "experience_years", "languages", "contact"),
        "Brightwater Analytics is looking for a senior data engineer for its office in Rotterdam (two days a week from home). "
        "You have at least six years of experience, write Python and Scala, and have run pipelines of several terabytes a day. "
        "We offer 78,000 euros a year and 30 days of leave. Write to Joost Hendriksen, careers@brightwater-analytics.example.",
    ),
    (
        ("flight", "from", "to", "departure", "arrival", "seat", "passenger", "booking_code"),
        "Your journey: flight KQ 8817 from Lisbon (LIS) to Reykjavik (KEF) on Saturday, 9 August. Departure 07:35, arrival "
        "11:50 local time. Passenger: Marguerite Desrosiers-Ng, seat 23F, one piece of baggage. Booking code: P7XW4Q. Please "
        "be at the gate forty minutes before departure.",
    ),
    (
        ("host", "severity", "service", "first_error", "failed_requests", "cause", "fixed_by"),
        "Incident report: on db-replica-07.eu-west.example the service 'ledger-writer' refused connections from 02:13:44 UTC "
        "(first error: 'connection pool exhausted: 512 of 512 in use') until 02:41. 18,204 requests failed. Severity: 2. The "
        "cause was a migration that held a lock on the table 'settlements'. Fixed by restarting the pool (P. Raghunathan).",
    ),
    (
        ("property", "address", "rooms", "area", "rent", "deposit", "free_from", "agent"),
        "To let: a bright flat under the roof at 17 Rue des Tanneurs, 67000 Strasbourg, three rooms and a kitchen, 74 square "
        "metres, quiet, with a view of the river. Rent 1,140 euros a month with heating, deposit two months' rent, free from "
        "1 December. No lift. Viewings on Thursdays; ask for Mme Clothilde Baumgartner.",
    ),
    (
        ("team", "opponent", "score", "stadium", "attendance", "scorers", "next_match"),
        "Northgate Rovers beat Castlefield Athletic 3-2 at Millbrook Park on Sunday in front of 21,408 spectators. Danso "
        "scored twice in the first half; after goals by Petrov and O'Rourke for the visitors it was the young substitute "
        "Ferreira who decided the match in the 88th minute. The Rovers play at Sandhaven next Saturday.",
    ),
)

# Topics of Python's own help, and a question that one of them answers.
QUESTIONS = (
    ("for", "When is the else clause of a for loop executed?"),
    ("assert", "What does an assert statement do when __debug__ is false?"),
    ("global", "What must be true of names listed in a global statement?"),
    ("yield", "What does a yield statement have in common with a yield expression?"),
    ("del", "In which order does the deletion of a target list delete each target?"),
    ("context-managers", "What do context managers do, and what are they typically used for?"),
    ("return", "What happens when return passes control out of a try statement with a finally clause?"),
    ("nonlocal", "How does the nonlocal statement differ from the global statement?"),
    ("truth", "Which values are considered false?"),
    ("continue", "What happens when continue passes control out of a try statement with a finally clause?"),
    ("booleans", "What values do the expressions x and y, and x or y, yield?"),
    ("slicings", "What is the slice object of a proper slice made of?"),
)

SENTENCE = (
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is Madrid. The capital of Portugal is"
)
STORY = (
    "It had not rained for a hundred days when the stranger walked into the village with a small blue umbrella under one arm. "
    "Nobody asked where she came from; people only looked at the umbrella, and then, one after the other, up at the sky."
)
RECORDS = (
    '[\n  {"id": 1041, "name": "Ada Lindgren", "city": "Uppsala", "orders": [17, 23], "active": true},\n'
    '  {"id": 1042, "name": "Bo Achterberg", "city": "Utrecht", "orders": [4], "active": false},\n'
    '  {"id": 1043, "name": "Chiara Fontana", "city": "Udine", "orders": [], "active": true}\n]\n'
    "The same list sorted by city, from A to Z:\n"
    '[\n  {"id": 1043, "name": "Chiara Fontana",'
)
LANGUAGES = (
    "Good morning - Guten Morgen - Bonjour - 早上好 - доброе утро - καλημέρα - 🌅☕. 1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8. "
    "Gute Nacht - Bonne nuit - 晚安 - спокойной ночи - καληνύχτα - 🌙😴. 8 + 8 = 16. Good night -"
)
