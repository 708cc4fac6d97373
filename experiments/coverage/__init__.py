"""Do 95 % intervals of private regressions hold the truth 95 % of the time, and how wide are they?"""
