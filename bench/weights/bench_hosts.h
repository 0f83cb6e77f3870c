/* Hosts of a benchmark, and the rate of TCP between two of them. A host is a network namespace by
 * name, or "~name", which is this machine under another name. */
#pragma once

#include "bench/rows.h"

#include <stdint.h>

/* Ends the program when a host is neither a namespace nor "~name". */
void bench_hosts_check(bench *b, char *const *hosts, uint32_t count);
/* Moves this process, which must be a child, into a host's network, and has its data served there.
 * NULL means this machine as it is. Returns false, with errno set, when that fails. */
bool bench_host_enter(const char *host);
/* Returns the bytes/s of one TCP connection from a host to another. iperf3 measures it where it is
 * installed and both hosts are namespaces. Otherwise `bytes` bytes are sent through a plain pair of
 * sockets. *how is a static string that says which. */
double bench_hosts_rate(bench *b, const char *from, const char *to, double bytes, const char **how);
