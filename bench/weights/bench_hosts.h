/* Hosts of a benchmark: network namespaces by name, or "~name", this machine under another name;
 * and what TCP does between two of them. */
#pragma once

#include "bench/rows.h"

#include <stdint.h>

/* Dies when one of them is neither a namespace nor "~name". */
void bench_hosts_check(bench *b, char *const *hosts, uint32_t count);
/* Moves this process, a child, into a host's network and lets its data be served there. NULL: this
 * machine as it is. false: errno. */
bool bench_host_enter(const char *host);
/* Bytes/s of one TCP connection from a host to another: iperf3's where it is installed and both are
 * namespaces, else that of a plain pair of sockets. *how: which it was, static. */
double bench_hosts_rate(bench *b, const char *from, const char *to, double bytes, const char **how);
