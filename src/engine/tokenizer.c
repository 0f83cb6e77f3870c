#include "engine/tokenizer.h"

size_t dray__bytes_encode(const void *text, size_t bytes, int32_t *tokens)
{
    for (size_t i = 0; i < bytes; i++)
        tokens[i] = ((const unsigned char *)text)[i];
    return bytes;
}

size_t dray__bytes_decode(const int32_t *tokens, size_t count, void *text)
{
    size_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        if (tokens[i] >= 0 && tokens[i] < 256)
            ((unsigned char *)text)[bytes++] = (unsigned char)tokens[i];
    return bytes;
}
