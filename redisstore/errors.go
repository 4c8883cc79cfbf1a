package redisstore

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/redis/rueidis"

	edgelimit "github.com/edgelimit/caddy-edgelimit"
)

// classify says what an error means for the store, and what to do about it.
func classify(err error, cluster bool) error {
	if errors.As(err, new(*edgelimit.StoreError)) {
		return err
	}
	kind := kindOf(err, cluster)
	storeErr := &edgelimit.StoreError{Kind: kind, Advice: advice[kind], Err: err}
	if strings.Contains(err.Error(), "No such master") {
		storeErr.Advice = "see master_name: the Sentinels know no master by that name"
	}
	return storeErr
}

var advice = map[string]string{
	edgelimit.StoreAuth:     "see username and password, and that the user may run what the documentation lists",
	edgelimit.StoreTLS:      "see that both sides speak TLS, or none, and that tls names the authority of the server's certificate",
	edgelimit.StoreNotRedis: "see that address is that of a Redis or Valkey; for Sentinels add master_name",
	edgelimit.StoreCluster:  "the address is a node of a cluster: give several of its nodes",
	edgelimit.StoreReadOnly: "the address is a replica: give the master's, or those of the Sentinels with master_name",
	edgelimit.StoreNetwork:  "see that the server runs, and that address is its",
	edgelimit.StoreTimeout:  "see that the server runs and is not overloaded, and that nothing on the way drops what is sent",
	edgelimit.StoreMemory:   "raise maxmemory, or set maxmemory-policy volatile-ttl",
}

// beginnings of what servers answer, without the word ERR, which the client
// library takes away.
var answers = []struct{ begins, kind string }{
	{"WRONGPASS", edgelimit.StoreAuth},
	{"NOAUTH", edgelimit.StoreAuth},
	{"NOPERM", edgelimit.StoreAuth},
	{"The user executing the script", edgelimit.StoreAuth},
	{"AUTH", edgelimit.StoreAuth},
	{"Client sent AUTH", edgelimit.StoreAuth},
	{"invalid password", edgelimit.StoreAuth},
	{"READONLY", edgelimit.StoreReadOnly},
	{"OOM", edgelimit.StoreMemory},
	{"MOVED", edgelimit.StoreCluster},
	{"ASK", edgelimit.StoreCluster},
	{"CROSSSLOT", edgelimit.StoreCluster},
	{"LOADING", edgelimit.StoreUnavailable},
	{"BUSY", edgelimit.StoreUnavailable},
	{"CLUSTERDOWN", edgelimit.StoreUnavailable},
	{"MASTERDOWN", edgelimit.StoreUnavailable},
	{"TRYAGAIN", edgelimit.StoreUnavailable},
	{"MISCONF", edgelimit.StoreUnavailable},
	{"NOREPLICAS", edgelimit.StoreUnavailable},
	{"unknown command", edgelimit.StoreNotRedis},
	{"This instance has cluster support disabled", edgelimit.StoreNotRedis},
}

func kindOf(err error, cluster bool) string {
	if redisErr, ok := rueidis.IsRedisErr(err); ok {
		// what a script runs into is told as "... script: f_..., on @user_script:1."
		text := strings.TrimPrefix(redisErr.Error(), "Error running script: ")
		for _, answer := range answers {
			if strings.HasPrefix(text, answer.begins) || strings.Contains(text, "-"+answer.begins+" ") {
				if answer.kind == edgelimit.StoreCluster && cluster {
					return edgelimit.StoreUnavailable // it is being rearranged
				}
				return answer.kind
			}
		}
		return edgelimit.StoreOther
	}
	var netErr net.Error
	switch text := err.Error(); {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return edgelimit.StoreTimeout
	case errors.As(err, new(tls.RecordHeaderError)), errors.As(err, new(*tls.CertificateVerificationError)),
		errors.As(err, new(x509.UnknownAuthorityError)), errors.As(err, new(x509.HostnameError)), errors.As(err, new(tls.AlertError)),
		strings.Contains(text, "tls: "):
		return edgelimit.StoreTLS
	case errors.Is(err, errProtocol), strings.Contains(text, "unknown message type"), strings.Contains(text, "protocol"):
		return edgelimit.StoreNotRedis
	case errors.As(err, &netErr) && netErr.Timeout():
		return edgelimit.StoreTimeout
	case errors.As(err, &netErr), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed),
		errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, rueidis.ErrClosing), errors.Is(err, rueidis.ErrNoSlot):
		return edgelimit.StoreNetwork
	}
	return edgelimit.StoreOther
}
