"""Sums over silos of which only the total is ever seen: integers mod 2^k, role machines without I/O (SPEC 4).

modulus = modulus_for(num_clients=10, largest_count=4096, noise_stddev=900.0, dimension=218, num_sums=1000)
sums = SecretSharingSum(modulus=modulus, num_clients=10, colluding=1, compute_nodes=3, study_hash=study_hash)
total = sums.total({0: counts_of_silo_0, 1: counts_of_silo_1, ...}, sum_index=0)
"""
