/* The image that the fake NVRTC makes, and that the fake driver loads. */
#pragma once

#include "fake.h"

#define FAKE_IMAGE "fake cubin\n"

typedef struct fake_image {
    char magic[16];
    uint64_t arch, source;
    uint64_t sum; /* of the fields before it */
} fake_image;

uint64_t fake_image_sum(const void *data, size_t size);
