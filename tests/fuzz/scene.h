/* A coordinator and a keeper in a thread, and a proxy between them and their clients. The proxy
 * gives every frame to a watcher, which can read and change it. Scenes are the messages of
 * trainers, engines and tasks, so that targets begin with real messages. */
#pragma once

#include "control/frame.h"
#include "fuzz/fuzz.h"

#include <pthread.h>

enum { SCENE_COORDINATOR, SCENE_KEEPER, SCENE_SERVERS };

/* One connection through the proxy, from its beginning to its end. */
typedef struct scene_link {
    struct scene_link *next;
    int server;      /* SCENE_... */
    uint32_t number; /* of its server's connections, from 0 */
    int fds[2];      /* the client's, the server's */
    dray__inbox from[2];
    void *user; /* the watcher's */
} scene_link;

/* Is called in the proxy's thread for each frame. `answer` is true for the server's frames. The
 * watcher passes the frame on with scene_send, or drops it. */
typedef void (*scene_watch)(void *user, scene_link *link, bool answer, const dray__frame *frame,
                            const int *fds);
void scene_send(scene_link *link, bool answer, const dray__frame *frame, const int *fds);
void scene_send_bytes(scene_link *link, bool answer, const void *data, size_t size);

/* Writes an answer's payload, with `keeper` in place of the keeper's path, if it has one. */
void scene_put_answer(dray__writer *w, const dray__frame *frame, const char *keeper);

typedef struct scene scene;

/* Starts the servers and the proxy. `journals` is the folder of durable queues; NULL means none. */
scene *scene_start(const char *journals, scene_watch watch, void *user);
/* Starts the proxy alone, for servers that run elsewhere. */
scene *scene_start_at(const char *const paths[SCENE_SERVERS], scene_watch watch, void *user);
const char *scene_address(const scene *s); /* of the coordinator, for clients */
const char *scene_path(const scene *s, int server);
void scene_stop(scene *s); /* all clients must be closed */

/* Returns the path of a keeper that lives as long as the process. */
const char *scene_keeper(void);

/* How long clients and servers wait for each other when messages are disturbed. */
extern int64_t scene_patience_ns;

/* The work of clients, each of which opens and closes its own session. `name` is that of the queue
 * or the model. Step 0 is the whole story of a queue, and another step is one partition of many.
 * They return false when a request was refused, which happens only when the watcher disturbs
 * messages. With `strict`, a refusal ends the process. */
bool scene_queue(const char *address, const char *name, int durability, uint32_t step, bool strict);
bool scene_weights(const char *address, const char *name, bool strict);
bool scene_by_hand(const char *address, const char *name, bool strict);
bool scene_leases(const char *address, const char *name, bool strict);
