"""Submission archives: built from this repository, and checked the way a grader would."""
