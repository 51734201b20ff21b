"""Print the rules of all claims as the page docs/claims.md."""

from analysis.claims import rules

if __name__ == "__main__":
    print(rules(), end="")
