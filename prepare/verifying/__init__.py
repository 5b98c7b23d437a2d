"""The parts of a verification: cases, runs, their cost, tolerances, the culprit, and the words for it."""
