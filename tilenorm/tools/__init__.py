"""What no call needs: compiling ahead, tuning, explaining, and what this machine has."""
