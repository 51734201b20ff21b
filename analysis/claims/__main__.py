"""Print the rules of all claims as the page docs/claims.md; or find out how often they err, which takes long."""

import sys

from analysis.claims import rules

if __name__ == "__main__":
    if sys.argv[1:2] == ["--simulate"]:
        from analysis.claims import simulation

        simulation.write(int(sys.argv[2]), sys.argv[3:])
    else:
        print(rules(), end="")
