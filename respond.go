package edgelimit

import (
	"errors"
	"net/http"
	"strconv"
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
	state.denial = d
	if d.wait > 0 {
		w.Header()["Retry-After"] = []string{strconv.FormatInt(retryAfter(d.wait), 10)}
	}
	if r.ProtoMajor == 1 && r.ContentLength != 0 && r.Body != nil && r.Body != http.NoBody {
		// The body stays unread. Without this, net/http would read on for a
		// while before it answers. On HTTP/2 it would end the connection for all
		// who share it, and a stream needs no such thing.
		w.Header()["Connection"] = []string{"close"}
	}
	if hasErrorRoutes(r) {
		// caddyhttp.Error would add a random id and a look-up of the stack.
		return caddyhttp.HandlerError{StatusCode: d.status, Err: d.err}
	}
	w.Header()["Content-Type"] = plainText
	w.WriteHeader(d.status)
	_, err := w.Write([]byte(http.StatusText(d.status) + "\n"))
	return err
}

var plainText = []string{"text/plain; charset=utf-8"}

// retryAfter is the wait in whole seconds, rounded up, so that a client which
// waits so long passes.
func retryAfter(wait time.Duration) int64 {
	return max(1, int64((wait+time.Second-1)/time.Second))
}

// hasErrorRoutes says whether an error would be handled by routes. Within these
// it would not: Caddy logs an error there as its own.
func hasErrorRoutes(r *http.Request) bool {
	if r.Context().Value(caddyhttp.ErrorCtxKey) != nil {
		return false
	}
	server, _ := r.Context().Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	return server != nil && server.Errors != nil && len(server.Errors.Routes) > 0
}
