package edgelimit

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

// cost is how many requests' worth a request takes from a budget: a number, or
// what a placeholder says.
type cost struct {
	fixed float64 // 0: from pieces
	parts []keyPart
}

// parseCost reads a cost; "" is 1. A number above the burst could never pass.
func parseCost(s string, burst int64) (cost, error) {
	if s == "" {
		return cost{fixed: 1}, nil
	}
	if strings.Contains(s, "{") {
		pieces, err := parsePieces("cost", s)
		if err != nil {
			return cost{}, err
		}
		return cost{parts: []keyPart{{raw: s, pieces: pieces}}}, nil
	}
	n, ok := positiveNumber(s)
	if !ok {
		return cost{}, fmt.Errorf("cost %q: must be a positive number or a placeholder", s)
	}
	if n > float64(burst) {
		return cost{}, fmt.Errorf("cost %s is more than the burst %d: such a request could never pass", s, burst)
	}
	return cost{fixed: n}, nil
}

// of computes the cost of a request. ok is false where a placeholder gave no
// positive number, which counts as 1.
func (c *cost) of(repl *caddy.Replacer) (n float64, ok bool) {
	if c.fixed > 0 {
		return c.fixed, true
	}
	text, _ := c.parts[0].evaluate(repl)
	if n, ok = positiveNumber(text); !ok {
		return 1, false
	}
	return n, true
}

// positiveNumber reads a number. One that is too large for a float64 is the
// largest, which no budget has, and not one that cannot be read.
func positiveNumber(s string) (float64, bool) {
	n, err := strconv.ParseFloat(s, 64)
	if errors.Is(err, strconv.ErrRange) && n > 0 {
		return math.MaxFloat64, true
	}
	return n, err == nil && n > 0 && !math.IsInf(n, 0)
}
