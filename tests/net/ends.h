/* Both ends of a connection over one carrier of the table, in this process, for tests that step
 * them alternately. */
#pragma once

#include <stdint.h>

#include "base/clock.h"
#include "net/carrier.h"
#include "suite.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const dray__networks no_networks;
static const dray__tls_key ends_key = {.identity = "dray1.session.data",
                                       .bytes = "thirty-two bytes of a session's"};

typedef struct ends {
    dray__stream_keys reader_keys, server_keys;
    uint32_t avoid; /* every carrier but the one under test */
    char folder[32], endpoint[DRAY__STREAM_ADDRESS];
    int listener;
    dray__stream *reader, *server;
} ends;

static void ends_listen(ends *e, const dray__carrier *carrier)
{
    char address[64] = "127.0.0.1";
    dray_error error = {0};
    *e = (ends){.folder = "/tmp/dray-net-XXXXXX"};
    e->reader_keys = e->server_keys = (dray__stream_keys){.key = &ends_key,
                                                          .trusted = &no_networks,
                                                          .always = carrier->encrypts,
                                                          .transport = carrier->transport};
    for (uint32_t i = 0; dray__carrier_at(i); i++)
        e->avoid |= dray__carrier_at(i) == carrier ? 0 : 1u << i;
    assert_non_null(mkdtemp(e->folder));
    if (strcmp(carrier->scheme, "tcp") != 0)
        snprintf(address, sizeof address, "%s:%s/s", carrier->scheme, e->folder);
    int rc = dray__stream_listen(address, e->endpoint, &e->listener, &error);
    if (rc)
        fail_msg("%s", error.message);
}

static void ends_connect(ends *e)
{
    dray_error error = {0};
    int rc = dray__stream_connect(e->endpoint, &e->reader_keys, e->avoid, &e->reader, &error);
    if (rc)
        fail_msg("%s", error.message);
}

static void ends_accept(ends *e)
{
    struct pollfd p = {.fd = e->listener, .events = POLLIN};
    assert_int_equal(poll(&p, 1, 20000), 1);
    assert_int_equal(dray__stream_accept(e->listener, &e->server_keys, &e->server, NULL), 0);
}

/* Steps both ends until they are ready, or until shortly after one has failed. Sets *reader and
 * *server to the results. DRAY_EAGAIN means that an end still waited when the other one failed. */
__attribute__((unused)) static void ends_agree(ends *e, int *reader, int *server, dray_error *error)
{
    int64_t until = dray__now() + 20 * DRAY__SECOND;
    *reader = *server = DRAY_EAGAIN;
    while (dray__now() < until && (*reader == DRAY_EAGAIN || *server == DRAY_EAGAIN)) {
        if (*reader == DRAY_EAGAIN)
            *reader = dray__stream_ready(e->reader, error);
        if (*server == DRAY_EAGAIN)
            *server = dray__stream_ready(e->server, NULL);
        if (*server == DRAY_OK && !dray__stream_carrier(e->server))
            break;
        if ((*reader && *reader != DRAY_EAGAIN) || (*server && *server != DRAY_EAGAIN))
            until = until < dray__now() + DRAY__SECOND / 2 ? until : dray__now() + DRAY__SECOND / 2;
    }
}

static void ends_close(ends *e)
{
    dray__stream_close(e->reader);
    dray__stream_close(e->server);
    if (e->listener >= 0)
        close(e->listener);
    e->reader = e->server = NULL;
    char path[64];
    snprintf(path, sizeof path, "%s/s", e->folder);
    unlink(path);
    rmdir(e->folder);
}
