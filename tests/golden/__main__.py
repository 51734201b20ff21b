"""Write the golden numbers anew: `make golden`, after the version of what has changed was raised."""

from tests import golden

golden.write()
print(f"{len(golden.stored())} entries in {golden.FILE.name}; look at the difference before you commit it")
