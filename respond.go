package edgelimit

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// exceededError is what error routes get from a denial.
type exceededError struct{ kind, name string }

func (e *exceededError) Error() string { return "edge_limit: " + e.kind + " " + e.name + " exceeded" }

var (
	errUnresolved = errors.New("edge_limit: the client could not be resolved")
	errTooEarly   = errors.New("edge_limit: early data does not prove the client's address")
)

// deny answers a request that may not pass. With error routes in the server it
// is an error that these handle. Without any, the response is written directly,
// which costs a third of that and keeps a flood out of the error log.
func (h *Handler) deny(w http.ResponseWriter, r *http.Request, state *requestState, d denial) error {
	state.exceeded = exceeded{d.name, d.wait}
	if d.wait > 0 {
		w.Header()["Retry-After"] = []string{strconv.FormatInt(retryAfter(d.wait), 10)}
	}
	if d.quota != nil {
		d.quota.write(w.Header())
	}
	unread := r.ProtoMajor == 1 && r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody
	if unread {
		leaveBodyUnread(w)
	}
	if h.hasErrorRoutes(r) {
		// caddyhttp.Error would add a random id and a look-up of the stack.
		return caddyhttp.HandlerError{StatusCode: d.status, Err: d.err}
	}
	if unread {
		// nobody behind needs the body, and who never sends it shall not hold on
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Second))
	}
	if d.problem == nil || !acceptsJSON(r) {
		w.WriteHeader(d.status) // no body, as of any error of Caddy's that nobody handles
		return nil
	}
	w.Header()["Content-Type"] = problemJSON
	w.WriteHeader(d.status)
	_, err := w.Write(d.problem)
	return err
}

var problemJSON = []string{"application/problem+json"}

// acceptsJSON says whether the client asks for JSON in any form, and so can read
// problem details. Browsers do not ask for it.
func acceptsJSON(r *http.Request) bool {
	for _, accept := range r.Header["Accept"] {
		if strings.Contains(accept, "json") {
			return true
		}
	}
	return false
}

// problem is a problem detail (RFC 9457) of one of the types that
// draft-ietf-httpapi-ratelimit-headers registers.
type problem struct {
	Type             string   `json:"type"`
	Title            string   `json:"title"`
	Status           int      `json:"status"`
	ViolatedPolicies []string `json:"violated-policies,omitempty"`
}

const problemTypes = "https://iana.org/assignments/http-problem-types#"

// quotaExceeded tells which limit the client has used up.
func quotaExceeded(name string, status int) []byte {
	return problemBody(problem{problemTypes + "quota-exceeded", "Request cannot be satisfied as assigned quota has been exceeded", status, []string{name}})
}

// reducedCapacity tells of a budget that is everybody's, without its name.
func reducedCapacity(status int) []byte {
	return problemBody(problem{problemTypes + "temporary-reduced-capacity", "Request cannot be satisfied due to temporary server capacity constraints", status, nil})
}

func problemBody(p problem) []byte {
	body, _ := json.Marshal(p)
	return append(body, '\n')
}

var denialOfUnresolved = denial{
	name: unresolvedName, status: http.StatusForbidden,
	refusal: &refusal{err: errUnresolved},
}

// leaveBodyUnread ends the connection with the response, for a body that stays
// unread: else net/http would read on for a while before it answers. (On HTTP/2
// it would end the connection for all who share it, and a stream needs no such
// thing.)
//
// A connection that is closed while a client still sends is reset, and the
// response can be lost with it: a proxy in front then answers 502. net/http
// waits half a second between the response and the close, for the client to read
// it, after a MaxBytesReader was read too far.
func leaveBodyUnread(w http.ResponseWriter) {
	w.Header()["Connection"] = []string{"close"}
	for {
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			break
		}
		w = wrapper.Unwrap()
	}
	tooLong := http.MaxBytesReader(w, io.NopCloser(strings.NewReader("xx")), 0)
	_, _ = tooLong.Read(make([]byte, 1))
}

// retryAfter is the wait in whole seconds, rounded up, so that a client which
// waits so long passes.
func retryAfter(wait time.Duration) int64 {
	return max(1, int64((wait+time.Second-1)/time.Second))
}

// hasErrorRoutes says whether an error would be handled by routes. Within these
// it would not: Caddy logs an error there as its own.
func (h *Handler) hasErrorRoutes(r *http.Request) bool {
	server := h.server
	return server != nil && server.Errors != nil && len(server.Errors.Routes) > 0 && !isErrorRoute(r)
}
