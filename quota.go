package edgelimit

import (
	"net/http"
	"strconv"
	"time"

	"github.com/dunglas/httpsfv"
)

// The values of the option ratelimit_headers.
const (
	headersOff  = "off"
	headersIETF = "ietf" // draft-ietf-httpapi-ratelimit-headers
	headersX    = "x"    // X-RateLimit-*, as many services send them
)

// quota is what a response tells the client of the one limit that is closest to
// denying. Ceilings are never told: their headroom is nobody's business.
type quota struct {
	style     string
	limit     *Limit
	remaining int64
	reset     time.Duration // until more is possible, or until all is there again
}

// quota describes the limit, of those charged, that is closest to denying, or
// returns nil if there is none. What is only observed denies nothing, and a
// client that is told of it would hold back all the same.
func (h *Handler) quota(charges []charge, now int64) *quota {
	var closest *quota
	for i := range charges {
		limit, ok := charges[i].budget.(*Limit)
		if !ok || h.observes(limit) {
			continue
		}
		if q := limit.quota(h.headers, charges[i].key, now); closest == nil || q.remaining < closest.remaining ||
			q.remaining == closest.remaining && q.reset > closest.reset {
			closest = q
		}
	}
	return closest
}

func (l *Limit) quota(style string, key uint64, now int64) *quota {
	debts := l.state.of(key, now)
	tat := debts.Peek(key, now)
	q := &quota{style: style, limit: l, remaining: debts.remaining(tat, now), reset: time.Duration(max(0, tat-now))}
	if ban := l.banned(key, now); q.remaining == 0 || ban > 0 {
		q.remaining = 0
		q.reset = max(debts.wait(tat, debts.emissionInterval, now), ban)
	}
	return q
}

// write sets the headers, in the place of any that are there.
func (q *quota) write(h http.Header) {
	window := int64((q.limit.rate.window + time.Second - 1) / time.Second)
	reset := int64((q.reset + time.Second - 1) / time.Second)
	if q.style == headersX {
		h["X-Ratelimit-Limit"] = []string{strconv.FormatInt(q.limit.rate.count, 10)}
		h["X-Ratelimit-Remaining"] = []string{strconv.FormatInt(q.remaining, 10)}
		h["X-Ratelimit-Reset"] = []string{strconv.FormatInt(reset, 10)}
		return
	}
	h["Ratelimit-Policy"] = []string{q.item("q", q.limit.rate.count, "w", window)}
	h["Ratelimit"] = []string{q.item("r", q.remaining, "t", reset)}
}

// item is a structured field of one item: the limit's name and two parameters.
func (q *quota) item(param1 string, value1 int64, param2 string, value2 int64) string {
	item := httpsfv.NewItem(q.limit.Name)
	item.Params.Add(param1, value1)
	item.Params.Add(param2, value2)
	text, err := httpsfv.Marshal(httpsfv.List{item})
	if err != nil {
		return "" // not reached: the name is [a-z0-9_]+ and the values are integers
	}
	return text
}
